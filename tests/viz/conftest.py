import pytest

from perfmodel.prediction import predict


@pytest.fixture(scope="session")
def prediction():
    return predict("gpt3-1.3b", "dgx-a100", "tp=2,pp=4,dp=4,zero=1", global_batch=32, timeline=True)


@pytest.fixture(scope="session")
def bidirectional():
    return predict("gpt3-1.3b", "dgx-a100", "tp=2,pp=4,dp=2,zero=1,schedule=chimera", global_batch=16, timeline=True)
