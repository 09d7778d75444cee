"""How use of a device is asked for: the loop with a stand-in device, NVML's answers in its own records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ncclep_bench.backends.cuda import utilisation as use
from ncclep_bench.runtime import nvml
from ncclep_bench.runtime.world import SelfGroup


class Device:
    """Does so many operations a second, when it is waited for."""

    bus_id = "0000:01:00.0"

    def __init__(self) -> None:
        self.waiting = self.done = 0

    def operation(self) -> None:
        self.waiting += 1

    def synchronize(self) -> None:
        time.sleep(self.waiting * 1e-3)
        self.done, self.waiting = self.done + self.waiting, 0


class Meter:
    def __init__(self, device: Device) -> None:
        self.device, self.before, self.glances = device, 0, 0

    def start(self) -> None:
        self.before = self.device.done

    def glance(self) -> None:
        assert self.device.waiting, "asked while the device works"
        self.glances += 1

    def stop(self) -> dict[str, float]:
        return {"gpu_util": 1.0}


def test_use_is_asked_for_while_operations_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device()
    meter = Meter(device)
    session: Any = SimpleNamespace(group=SelfGroup(), check=lambda: None)
    monkeypatch.setattr(nvml, "meter", lambda bus_id: contextlib.nullcontext(meter))
    for name, seconds in (("LOOP_S", 0.2), ("_BATCH_S", 0.02), ("_GLANCES_FROM_S", 0.1)):
        monkeypatch.setattr(use, name, seconds)

    assert use.utilisation(session, device, device.operation) == {"gpu_util": 1.0}

    # Doubled until a batch is long enough, then batches of that size.
    assert meter.before >= 31
    assert 2 <= meter.glances <= 6
    assert device.done > meter.before


def test_without_a_driver_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device()
    session: Any = SimpleNamespace(group=SelfGroup(), check=lambda: None)
    monkeypatch.setattr(nvml, "meter", lambda bus_id: contextlib.nullcontext(None))
    for name in ("LOOP_S", "_BATCH_S"):
        monkeypatch.setattr(use, name, 0.005)

    assert use.utilisation(session, device, device.operation) == {}


class Nvml:
    """A driver's answers, in the records of the real binding."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.links_kib = {
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: 0,
            pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: 0,
        }
        self.monitors, self.samples, self.freed, self.open = True, 0, 0, 0
        self.shares = {pynvml.NVML_GPM_METRIC_SM_UTIL: 25.0, pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 50.0}
        answers = {
            "nvmlInit": self._init, "nvmlShutdown": self._shutdown,
            "nvmlDeviceGetHandleByPciBusId": lambda bus_id: bus_id,
            "nvmlDeviceGetFieldValues": self._fields,
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97),
            "nvmlGpmQueryDeviceSupport": lambda _: SimpleNamespace(isSupportedDevice=int(self.monitors)),
            "nvmlGpmSampleAlloc": self._alloc, "nvmlGpmSampleGet": lambda _, sample: sample,
            "nvmlGpmSampleFree": self._free, "nvmlGpmMetricsGet": self._metrics,
            "nvmlDeviceGetMaxClockInfo": lambda handle, clock: 3201,
            "nvmlDeviceGetMemoryBusWidth": lambda _: 6144,
        }  # fmt: skip
        for name, answer in answers.items():
            patch.setattr(pynvml, name, answer)

    def _init(self) -> None:
        self.open += 1

    def _shutdown(self) -> None:
        self.open -= 1

    def _fields(self, handle: Any, asked: list[tuple[int, int]]) -> list[Any]:
        return [
            SimpleNamespace(
                nvmlReturn=pynvml.NVML_SUCCESS if link < 18 else pynvml.NVML_ERROR_NOT_SUPPORTED,
                value=SimpleNamespace(ullVal=self.links_kib[field]),
            )
            for field, link in asked
        ]

    def _alloc(self) -> Any:
        self.samples += 1
        return pynvml.c_nvmlGpmSample_t()

    def _free(self, sample: Any) -> None:
        self.freed += 1

    def _metrics(self, asked: Any) -> None:
        assert asked.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn, metric.value = pynvml.NVML_SUCCESS, self.shares[metric.metricId]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    told = Nvml(monkeypatch)
    yield told
    assert (told.open, told.freed) == (0, told.samples)


def metered(driver: Nvml) -> dict[str, float]:
    with nvml.meter("0000:01:00.0") as meter:
        assert meter is not None
        meter.start()
        start = time.perf_counter()
        for field, kib in zip(driver.links_kib, (3 << 10, 1 << 10), strict=True):
            driver.links_kib[field] = kib
        time.sleep(0.05)
        meter.glance()
        used = meter.stop()
        used["longest_s"] = time.perf_counter() - start
    return used


def test_the_driver_tells_use_of_gpu_multiprocessors_memory_and_links(driver: Nvml) -> None:
    used = metered(driver)

    assert (used["gpu_util"], used["sm_util"]) == (0.97, 0.25)
    assert used["dram_gbps"] == pytest.approx(0.5 * 4916.7, rel=1e-4)
    sent_gb = 18 * (3 << 20) / 1e9
    assert sent_gb / used["longest_s"] <= used["nvlink_tx_gbps"] <= sent_gb / 0.05
    assert used["nvlink_tx_gbps"] == pytest.approx(3 * used["nvlink_rx_gbps"])


def test_what_a_driver_does_not_tell_is_left_out(driver: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise pynvml.NVMLError_NotSupported

    driver.monitors = False
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", refuse)

    assert set(metered(driver)) == {"gpu_util", "longest_s"}


def test_monitors_that_this_process_may_not_read_are_left_out(driver: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise pynvml.NVMLError_NoPermission

    monkeypatch.setattr(pynvml, "nvmlGpmSampleGet", refuse)

    assert set(metered(driver)) == {"gpu_util", "nvlink_tx_gbps", "nvlink_rx_gbps", "longest_s"}


def test_without_a_driver_there_is_no_meter() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with nvml.meter("0000:01:00.0") as meter:
            assert meter is None
    else:
        pynvml.nvmlShutdown()
        pytest.skip("a driver is here")
