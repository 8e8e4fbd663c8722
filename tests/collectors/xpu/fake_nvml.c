/* A libnvidia-ml.so.1 for tests. It answers from the file that FAKE_NVML names, read anew at each
 * call, with one "<gpu> <name> <value>" a line; gpu -1 is the whole host. What is not in the file is
 * not supported. "error.<function>" is what a function returns, "lost" loses a GPU from the bus,
 * and each new value of "events" is one event whose XID is the value of "xid". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7, TIMEOUT = 10,
       MISMATCH = 25, HOST = -1, MAX_GPUS = 8 };

typedef unsigned long long u64;
struct device { int gpu; };
struct event_set { u64 seen[MAX_GPUS]; int registered[MAX_GPUS]; };
struct event { struct device *device; u64 type, data; unsigned gpu_instance, compute_instance; };
struct process { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; };

static struct device devices[MAX_GPUS];
static int opened;

static int find(int gpu, const char *name, u64 *value) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char found[64];
    u64 scanned;
    int number, hit = 0;
    while (file && !hit && fscanf(file, "%d %63s %llu", &number, found, &scanned) == 3)
        hit = number == gpu && !strcmp(found, name);
    if (file) fclose(file);
    if (hit) *value = scanned;
    return hit;
}

static int check(int gpu, const char *function) {
    char name[64] = "error.";
    u64 value = 0;
    strncat(name, function, sizeof name - sizeof "error.");
    if (!opened) return UNINITIALIZED;
    if (gpu != HOST && find(gpu, "lost", &value) && value) return 15;
    return find(gpu, name, &value) ? (int)value : SUCCESS;
}

static int answer(struct device *device, const char *function, const char *name, u64 *value) {
    int code = check(device->gpu, function);
    if (code) return code;
    return find(device->gpu, name, value) ? SUCCESS : NOT_SUPPORTED;
}

static int answer32(struct device *device, const char *function, const char *name, unsigned *out) {
    u64 value = 0;
    int code = answer(device, function, name, &value);
    if (!code) *out = (unsigned)value;
    return code;
}

int nvmlInitWithFlags(unsigned flags) {
    u64 code = 0;
    (void)flags;
    find(HOST, "error.init", &code);
    if (!code) opened++;
    return (int)code;
}

int nvmlShutdown(void) {
    if (!opened) return UNINITIALIZED;
    opened--;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    u64 value = 0;
    int code = check(HOST, "count");
    if (code) return code;
    find(HOST, "gpus", &value);
    *count = (unsigned)value;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
    int code = check((int)index, "handle");
    if (code) return code;
    devices[index].gpu = (int)index;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(struct device *device, char *text, unsigned size) {
    int code = check(device->gpu, "uuid");
    if (!code) snprintf(text, size, "GPU-fake-%d", device->gpu);
    return code;
}

int nvmlDeviceGetName(struct device *device, char *text, unsigned size) {
    int code = check(device->gpu, "name");
    if (!code) snprintf(text, size, "Fake GPU");
    return code;
}

int nvmlDeviceGetUtilizationRates(struct device *device, unsigned *rates) {
    int code = answer32(device, "utilisation", "load", &rates[0]);
    return code ? code : answer32(device, "utilisation", "memory_load", &rates[1]);
}

int nvmlDeviceGetMemoryInfo(struct device *device, u64 *memory) {
    int code = answer(device, "memory", "memory_total", &memory[0]);
    if (!code) code = answer(device, "memory", "memory_used", &memory[2]);
    if (!code) memory[1] = memory[0] - memory[2];
    return code;
}

struct memory2 { unsigned version; u64 total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory2 *memory) {
    u64 first[3];
    int code = check(device->gpu, "memory2");
    if (!code) code = nvmlDeviceGetMemoryInfo(device, first);
    if (!code && memory->version != (sizeof *memory | 2u << 24)) code = MISMATCH;
    if (code) return code;
    memory->total = first[0];
    memory->reserved = 0;
    memory->free = first[1];
    memory->used = first[2];
    return SUCCESS;
}

int nvmlDeviceGetTemperature(struct device *device, int sensor, unsigned *celsius) {
    return sensor ? INVALID : answer32(device, "temperature1", "temperature", celsius);
}

struct temperature { unsigned version, sensor; int celsius; };

int nvmlDeviceGetTemperatureV(struct device *device, struct temperature *out) {
    return answer32(device, "temperature2", "temperature", (unsigned *)&out->celsius);
}

int nvmlDeviceGetPowerUsage(struct device *device, unsigned *milliwatts) {
    return answer32(device, "power", "power", milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(struct device *device, unsigned *milliwatts) {
    return answer32(device, "power_limit", "power_limit", milliwatts);
}

int nvmlDeviceGetClockInfo(struct device *device, unsigned clock, unsigned *mhz) {
    return answer32(device, "clock", clock == 1 ? "sm_clock" : "memory_clock", mhz);
}

int nvmlDeviceGetMaxClockInfo(struct device *device, unsigned clock, unsigned *mhz) {
    return answer32(device, "clock_max", clock == 1 ? "sm_clock_max" : "memory_clock_max", mhz);
}

int nvmlDeviceGetCurrentClocksEventReasons(struct device *device, u64 *reasons) {
    return answer(device, "reasons2", "reasons", reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *device, u64 *reasons) {
    return answer(device, "reasons1", "reasons", reasons);
}

int nvmlDeviceGetTotalEccErrors(struct device *device, int kind, int counter, u64 *errors) {
    (void)counter;
    return answer(device, "ecc", kind ? "ecc_uncorrected" : "ecc_corrected", errors);
}

int nvmlDeviceGetPcieThroughput(struct device *device, int counter, unsigned *kib_s) {
    return answer32(device, "pcie", counter ? "pcie_rx" : "pcie_tx", kib_s);
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count,
                                            struct process *processes) {
    unsigned room = processes ? *count : 0;
    u64 pid = 0;
    int code = answer(device, "processes", "pid", &pid);
    *count = code ? 0 : 1;
    if (code == NOT_SUPPORTED) return SUCCESS;
    if (code) return code;
    if (!room) return TOO_SMALL;
    memset(processes, 0, sizeof *processes);
    processes->pid = (unsigned)pid;
    return SUCCESS;
}

int nvmlEventSetCreate(struct event_set **set) {
    *set = calloc(1, sizeof **set);
    return check(HOST, "events");
}

int nvmlDeviceRegisterEvents(struct device *device, u64 types, struct event_set *set) {
    int code = check(device->gpu, "register");
    if (!code && types == 8) {
        set->registered[device->gpu] = 1;
        find(device->gpu, "events", &set->seen[device->gpu]);
    }
    return code;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned milliseconds) {
    int gpu;
    (void)milliseconds;
    if (!opened) return UNINITIALIZED;
    for (gpu = 0; gpu < MAX_GPUS; gpu++) {
        u64 count = set->seen[gpu], xid = 0;
        if (!set->registered[gpu] || !find(gpu, "events", &count) || count == set->seen[gpu])
            continue;
        set->seen[gpu] = count;
        find(gpu, "xid", &xid);
        *event = (struct event){&devices[gpu], 8, xid, 0, 0};
        return SUCCESS;
    }
    return TIMEOUT;
}
