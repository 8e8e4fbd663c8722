/* A libnvidia-ml.so.1 for tests. It answers from the file that FAKE_NVML names, read anew when it
 * changes, with one "<gpu> <name> <value>" a line; gpu -1 is the whole host, 100 + 10 * gpu + n the MIG
 * slice n of a GPU. What is not in the file is not supported. "error.<function>" is what a function
 * returns, "lost" loses a GPU from the bus, "field.<id>[.<link>]" is a field value ("all" for all
 * links), and each new value of "events" is one event whose XID is the value of "xid". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <sys/stat.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7,
       TIMEOUT = 10, MISMATCH = 25, HOST = -1, MAX_GPUS = 8, MAX_SLICES = 7, MAX_LINES = 1024 };

typedef unsigned long long u64;
struct device { int gpu; };
struct event_set { u64 seen[MAX_GPUS]; int registered[MAX_GPUS]; };
struct event { struct device *device; u64 type, data; unsigned gpu_instance, compute_instance; };
struct process { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; };
struct line { int gpu; char name[64]; u64 value; };

static struct device devices[MAX_GPUS], slices[MAX_GPUS][MAX_SLICES];
static int opened;
static struct line lines[MAX_LINES];
static int count_of_lines;
static struct stat read_at;
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;

static void load(void) {
    const char *path = getenv("FAKE_NVML");
    struct stat now;
    FILE *file;
    if (!path || stat(path, &now)) {
        count_of_lines = 0;
        return;
    }
    if (now.st_ino == read_at.st_ino && now.st_size == read_at.st_size
        && !memcmp(&now.st_mtim, &read_at.st_mtim, sizeof now.st_mtim))
        return;
    if (!(file = fopen(path, "r"))) return;
    read_at = now;
    for (count_of_lines = 0; count_of_lines < MAX_LINES; count_of_lines++) {
        struct line *line = &lines[count_of_lines];
        if (fscanf(file, "%d %63s %llu", &line->gpu, line->name, &line->value) != 3) break;
    }
    fclose(file);
}

static int find(int gpu, const char *name, u64 *value) {
    int number, hit = 0;
    pthread_mutex_lock(&reading);
    load();
    for (number = 0; !hit && number < count_of_lines; number++)
        if (lines[number].gpu == gpu && !strcmp(lines[number].name, name)) {
            *value = lines[number].value;
            hit = 1;
        }
    pthread_mutex_unlock(&reading);
    return hit;
}

static int board(int gpu) { return gpu >= 100 ? (gpu - 100) / 10 : gpu; }

static int check(int gpu, const char *function) {
    char name[64] = "error.";
    u64 value = 0;
    strncat(name, function, sizeof name - sizeof "error.");
    if (!opened) return UNINITIALIZED;
    if (gpu != HOST && find(board(gpu), "lost", &value) && value) return 15;
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
    if (!code) snprintf(text, size, device->gpu < 100 ? "GPU-fake-%d" : "MIG-fake-%d", device->gpu);
    return code;
}

int nvmlDeviceGetName(struct device *device, char *text, unsigned size) {
    int code = check(device->gpu, "name");
    if (!code) snprintf(text, size, device->gpu < 100 ? "Fake GPU" : "Fake GPU MIG 1g.10gb");
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
    static const char *names[] = {"pid", "pid2"};
    unsigned room = processes ? *count : 0, number;
    u64 pid = 0;
    int code = check(device->gpu, "processes");
    *count = 0;
    for (number = 0; !code && number < 2; number++)
        if (find(device->gpu, names[number], &pid)) {
            if (*count < room) {
                memset(&processes[*count], 0, sizeof *processes);
                processes[*count].pid = (unsigned)pid;
            }
            ++*count;
        }
    return code ? code : *count > room ? TOO_SMALL : SUCCESS;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci) {
    int code = check(device->gpu, "pci");
    if (code) return code;
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x3b + (unsigned)device->gpu;
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(struct device *device, unsigned *generation) {
    return answer32(device, "link", "pcie_gen", generation);
}

int nvmlDeviceGetCurrPcieLinkWidth(struct device *device, unsigned *width) {
    return answer32(device, "link", "pcie_width", width);
}

struct field {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type;
    int code;
    union { double real; unsigned small; u64 large; } value;
};

int nvmlDeviceGetFieldValues(struct device *device, int count, struct field *fields) {
    int code = check(device->gpu, "fields"), number;
    for (number = 0; !code && number < count; number++) {
        struct field *field = &fields[number];
        char name[64];
        u64 value = 0;
        if (field->scope == 0xffffffffu)
            snprintf(name, sizeof name, "field.%u.all", field->id);
        else if (field->scope)
            snprintf(name, sizeof name, "field.%u.%u", field->id, field->scope);
        else
            snprintf(name, sizeof name, "field.%u", field->id);
        field->code = find(device->gpu, name, &value) ? SUCCESS : NOT_SUPPORTED;
        field->type = field->id == 82 ? 1 : 3;
        if (field->type == 1) field->value.small = (unsigned)value;
        else field->value.large = value;
    }
    return code;
}

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
    *pending = 0;
    return answer32(device, "mig", "mig", current);
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *count) {
    *count = MAX_SLICES;
    return check(device->gpu, "slices");
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index,
                                        struct device **slice) {
    int number = 100 + 10 * device->gpu + (int)index, code = check(device->gpu, "slice");
    u64 value = 0;
    if (code) return code;
    if (!find(number, "memory_total", &value)) return NOT_FOUND;
    slices[device->gpu][index].gpu = number;
    *slice = &slices[device->gpu][index];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *instance) {
    *instance = 7 + (unsigned)device->gpu % 10;
    return check(device->gpu, "instance");
}

int nvmlEventSetCreate(struct event_set **set) {
    *set = calloc(1, sizeof **set);
    return check(HOST, "events");
}

int nvmlEventSetFree(struct event_set *set) {
    free(set);
    return opened ? SUCCESS : UNINITIALIZED;
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
