"""Runs one recipe under many layouts and shows what each of them sends, holds and takes."""
