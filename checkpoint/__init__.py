"""Saves a training state from any mesh and loads it onto any other."""

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
    check_siblings(("checkpoint",))
