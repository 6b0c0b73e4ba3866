/* The threads that kernels run on: those of the OpenMP runtime that PyTorch has loaded already, never a pool of our own, whose
 * threads would spin against PyTorch's. The runtime's entry points are handed over at load. How many threads to ask for comes
 * with every call, so that callers in several threads do not meddle with one another. */
#ifndef OUTRIDER_TEAM_H
#define OUTRIDER_TEAM_H

#include <stdint.h>

void team_run(void (*body)(void *), void *argument, int64_t threads);
int team_thread(void);
int team_size(void);

/* Waits for the whole team. Each thread has a `sense` of its own, which is zero at first and turns at every wait. */
typedef struct {
    volatile int32_t waiting, sense;
} team_barrier;
void team_wait(team_barrier *barrier, int32_t *sense);

#endif
