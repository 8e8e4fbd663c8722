/* Stands in for NVIDIA's runtime: the functions that are probed, with durations of our choosing. */
#include <unistd.h>

int cudaStreamSynchronize(void *stream) {
    (void)stream;
    return usleep(5000);
}

int cudaGraphLaunch(void *graph, void *stream) {
    (void)graph;
    (void)stream;
    return usleep(300);
}

int cudaLaunchKernel(void) { return 0; }
