"""Get values out of models that are not plain eager ones: compiled, FX, exported, TorchScript, instrumented."""
