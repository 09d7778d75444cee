"""The enumerations of the C names are NVIDIA's."""

from __future__ import annotations

import pytest

from ncclep_bench.ep import c_api
from ncclep_bench.model.dtype import DTYPES


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_datatypes_are_those_of_the_dtype_table(dtype):
    assert c_api.ncclDataType_t[dtype.nccl_name] == dtype.nccl_value


def test_result_codes_and_reductions_have_the_values_of_nccl_h():
    assert [code.name for code in c_api.ncclResult_t] == [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ]
    assert list(c_api.ncclResult_t) == list(range(9))
    assert [operation.name for operation in c_api.ncclRedOp_t] == [
        "ncclSum",
        "ncclProd",
        "ncclMax",
        "ncclMin",
        "ncclAvg",
    ]
    assert list(c_api.ncclRedOp_t) == list(range(5))


def test_init_without_group_or_config_is_an_invalid_argument():
    for arguments, words in (((None, object()), "group is NULL"), ((object(), None), "config is NULL")):
        result, comm = c_api.ncclEpInit(*arguments)

        assert (result, comm) == (c_api.ncclResult_t.ncclInvalidArgument, None)
        assert c_api.ncclGetLastError(comm) == words


def test_a_config_of_another_type_is_an_invalid_usage():
    result, _ = c_api.ncclEpInit(object(), {"num_experts": 8})

    assert result == c_api.ncclResult_t.ncclInvalidUsage
    assert "ep_config is a dict" in c_api.ncclGetLastError()
