// A driver library with two H200s that tests load in place of NVIDIA's; NVML_STANDIN names what is wrong with them.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, FORBIDDEN = 4, TOO_SMALL = 7, LOST = 15, MISMATCH = 18, WRONG_VERSION = 25 };

static bool is(const char *what) {
    const char *fault = getenv("NVML_STANDIN");
    return fault != nullptr && strstr(fault, what) != nullptr;
}

struct Gpu { int number; };
static Gpu gpus[2] = {{0}, {1}};
static const int links = 18;

struct Pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
struct Memory { unsigned long long total, free, used; };
struct Memory2 { unsigned version; unsigned long long total, reserved, free, used; };
struct Fabric { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned mask; unsigned char summary; };
struct Process { unsigned pid; unsigned long long used; unsigned instance, compute; };
struct FieldValue { unsigned id, scope; long long time, latency; unsigned kind; int result; unsigned long long value; };
struct Utilization { unsigned gpu, memory; };

static int put(char *to, unsigned room, const char *text, int number = -1) {
    snprintf(to, room, number < 0 ? "%s" : "%s%d", text, number);
    return OK;
}
template <typename T> static int give(T *to, T value) { *to = value; return OK; }

extern "C" {
int nvmlInitWithFlags(unsigned) {
    if (is("hang")) for (;;) sleep(1000);
    return is("mismatch") ? MISMATCH : is("forbidden") ? FORBIDDEN : OK;
}
int nvmlShutdown() { return OK; }
const char *nvmlErrorString(int code) { return code == OK ? "Success" : "In Progress"; }
int nvmlSystemGetDriverVersion(char *to, unsigned room) { return put(to, room, "580.159.04"); }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { return give(to, 13000); }
int nvmlSystemGetProcessName(unsigned pid, char *to, unsigned room) { return put(to, room, "python"); }
int nvmlDeviceGetCount_v2(unsigned *to) { return give(to, is("none") ? 0u : 2u); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **to) {
    return index == 1 && is("lost") ? LOST : give(to, &gpus[index]);
}
int nvmlDeviceGetName(Gpu *, char *to, unsigned room) {
    return put(to, room, is("pcie") ? "NVIDIA H100 PCIe" : is("nvl") ? "NVIDIA H100 NVL" : is("novel") ? "NVIDIA X9000" : "NVIDIA H200");
}
int nvmlDeviceGetUUID(Gpu *gpu, char *to, unsigned room) {
    return put(to, room, "GPU-00000000-0000-0000-0000-00000000000", gpu->number);
}
int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *to) {
    return put(to->bus_id, sizeof to->bus_id, gpu->number ? "00000000:00:07.0" : "00000000:00:06.0");
}
int nvmlDeviceGetCudaComputeCapability(Gpu *, int *major, int *minor) { *major = 9; return give(minor, 0); }
int nvmlDeviceGetMinorNumber(Gpu *gpu, unsigned *to) { return give(to, (unsigned)gpu->number); }
int nvmlDeviceGetPersistenceMode(Gpu *, unsigned *to) { return give(to, 1u); }
int nvmlDeviceGetMigMode(Gpu *, unsigned *current, unsigned *pending) {
    *pending = 0;
    return give(current, is("mig") ? 1u : 0u);
}
int nvmlDeviceGetPerformanceState(Gpu *, unsigned *to) { return give(to, 0u); }
int nvmlDeviceGetUtilizationRates(Gpu *, Utilization *to) { return give(to, Utilization{is("busy") ? 97u : 0u, 0}); }
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, unsigned long long *to) {
    return give(to, is("hot") && gpu->number ? 0x48ull : is("busy") ? 0ull : 1ull);
}
int nvmlDeviceGetCurrPcieLinkGeneration(Gpu *, unsigned *to) { return give(to, is("narrow") ? 1u : 5u); }
int nvmlDeviceGetMaxPcieLinkGeneration(Gpu *, unsigned *to) { return give(to, 5u); }
int nvmlDeviceGetCurrPcieLinkWidth(Gpu *, unsigned *to) { return give(to, is("narrow") ? 8u : 16u); }
int nvmlDeviceGetMaxPcieLinkWidth(Gpu *, unsigned *to) { return give(to, 16u); }
int nvmlDeviceGetPcieReplayCounter(Gpu *, unsigned *to) { return give(to, 0u); }
int nvmlDeviceGetMemoryInfo(Gpu *, Memory *to) { return give(to, Memory{143771ull << 20, 143771ull << 20, 0}); }
int nvmlDeviceGetMemoryInfo_v2(Gpu *, Memory2 *to) {
    return to->version == 0x02000028 ? give(to, Memory2{to->version, 143771ull << 20, 0, 143771ull << 20, 0}) : WRONG_VERSION;
}
int nvmlDeviceGetEccMode(Gpu *, unsigned *current, unsigned *pending) {
    *pending = 1;
    return is("pcie") ? UNSUPPORTED : give(current, 1u);
}
int nvmlDeviceGetTotalEccErrors(Gpu *, unsigned kind, unsigned counter, unsigned long long *to) {
    return is("pcie") ? UNSUPPORTED : give(to, is("rotten") && kind == 1 && counter == 0 ? 3ull : 0ull);
}
int nvmlDeviceGetRemappedRows(Gpu *, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    *correctable = *uncorrectable = *failed = 0;
    return give(pending, is("rotten") ? 1u : 0u);
}
int nvmlDeviceGetTemperature(Gpu *, unsigned, unsigned *to) { return give(to, 38u); }
int nvmlDeviceGetPowerManagementDefaultLimit(Gpu *, unsigned *to) { return give(to, 700000u); }
int nvmlDeviceGetEnforcedPowerLimit(Gpu *, unsigned *to) { return give(to, 700000u); }
int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *to) { return give(to, gpu->number ? 103400u : 104710u); }
int nvmlDeviceGetClockInfo(Gpu *, unsigned kind, unsigned *to) { return give(to, kind == 2 ? 3201u : 420u); }
int nvmlDeviceGetMaxClockInfo(Gpu *, unsigned kind, unsigned *to) { return give(to, kind == 2 ? 3201u : 1980u); }
int nvmlDeviceGetNvLinkState(Gpu *gpu, unsigned link, unsigned *to) {
    if (is("pcie")) return UNSUPPORTED;
    if (link >= links) return INVALID;
    if (is("nvl")) return give(to, link % 6 < 4 ? 1u : 0u);
    if (is("torn") && gpu->number == 1 && link == 4) return LOST;
    return give(to, is("dark") && gpu->number == 1 && link > 15 ? 0u : 1u);
}
int nvmlDeviceGetNvLinkVersion(Gpu *, unsigned, unsigned *to) { return give(to, 7u); }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, unsigned link, Pci *to) {
    if (is("bridged")) return nvmlDeviceGetPciInfo_v3(&gpus[1 - gpu->number], to);
    return put(to->bus_id, sizeof to->bus_id, "00000000:00:00.0");
}
int nvmlDeviceGetNvLinkErrorCounter(Gpu *, unsigned link, unsigned counter, unsigned long long *to) {
    return counter > 2 ? UNSUPPORTED : give(to, is("replays") && link == 3 && counter == 0 ? 255ull : 0ull);
}
int nvmlDeviceGetFieldValues(Gpu *, int count, FieldValue *to) {
    for (int n = 0; n < count; ++n) {
        to[n].result = is("noisy") ? OK : UNSUPPORTED;
        to[n].value = to[n].id == 220 && to[n].scope == 5 ? 3 << 8 | 9 : 15 << 8 | 255;
    }
    return OK;
}
int nvmlDeviceGetGpuFabricInfoV(Gpu *, Fabric *to) {
    if (is("pcie")) return UNSUPPORTED;
    if (to->version != 0x02000024 && (is("old") || to->version != 0x3000028)) return WRONG_VERSION;
    to->state = is("joining") ? 2 : 3;
    to->status = is("joining") ? 999 : OK;
    to->mask = is("weak") ? 1 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8 | 1 << 12 : is("told") ? 2 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8 | 1 << 12 : 0;
    if (to->version == 0x3000028) to->summary = is("weak") ? 2 : is("told") ? 1 : 0;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *to) {
    if (is("secret")) return FORBIDDEN;
    unsigned held = is("stray") ? (gpu->number ? 1 : 2) : 0, room = *count;
    *count = held;
    if (held == 0) return OK;
    if (to == nullptr || room < held) return TOO_SMALL;
    to[0] = {gpu->number ? 4712u : 4711u, is("untold") ? ~0ull : 20000ull << 20, ~0u, ~0u};
    if (held > 1) to[1] = {4712u, 520ull << 20, ~0u, ~0u};
    return OK;
}
int nvmlDeviceGetP2PStatus(Gpu *, Gpu *, unsigned capability, unsigned *to) {
    return give(to, is("barred") ? (capability < 2 ? 4u : 5u) : is("pcie") && capability == 2 ? 5u : 0u);
}
int nvmlDeviceGetTopologyCommonAncestor(Gpu *, Gpu *, unsigned *to) { return give(to, is("near") ? 10u : 30u); }
}
