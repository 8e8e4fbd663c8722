/* The functions of a libamd_smi.so for tests that do something: one card at 0000:c1:00.0, whose
 * metrics are the bytes of the file that FAKE_AMDSMI names; without it they are not supported. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 2, LARGEST = 1 << 16 };

int amdsmi_init(uint64_t flags) { return flags ? SUCCESS : NOT_SUPPORTED; }

int amdsmi_shut_down(void) { return SUCCESS; }

int amdsmi_get_socket_handles(uint32_t *count, void **handles) {
    *count = 1;
    if (handles) handles[0] = handles;
    return SUCCESS;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **handles) {
    *count = 1;
    if (handles) handles[0] = socket;
    return SUCCESS;
}

int amdsmi_get_gpu_device_bdf(void *card, uint64_t *address) {
    *address = 0xc1u << 8;
    return card ? SUCCESS : NOT_SUPPORTED;
}

int amdsmi_get_gpu_metrics_info(void *card, void *metrics) {
    const char *path = getenv("FAKE_AMDSMI");
    FILE *file = card && path ? fopen(path, "rb") : NULL;
    if (!file) return NOT_SUPPORTED;
    fread(metrics, 1, LARGEST, file);
    fclose(file);
    return SUCCESS;
}
