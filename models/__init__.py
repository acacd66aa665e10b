"""Models as plain modules that know nothing of ranks, each with a plan that says how it may be split."""

try:
    from parallel.shadowing import check_siblings
except ModuleNotFoundError as error:
    if error.name != "parallel.shadowing":
        raise
    import parallel

    raise ImportError(
        f"`parallel` resolves to {parallel.__file__}, which shadows meshwright's own; "
        "rename that one or run from another folder"
    ) from None
else:
    check_siblings(("models",))
