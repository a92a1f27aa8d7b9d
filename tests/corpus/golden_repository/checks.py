import pytest
import torch

import models
import train

torch.set_num_threads(int(__import__("os").environ.get("SAMPLE_THREADS", "1")))


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet", "moe", "tagger", "vit", "denoiser", "translator"])
def test_model(torchtap_golden, name):
    torchtap_golden(models.load(name), models.inputs(name), name=name)


@pytest.mark.parametrize("name", ["train_gpt", "train_resnet"])
def test_training(torchtap_golden, name):
    torchtap_golden.training(getattr(train, name), steps=3, name=name)
