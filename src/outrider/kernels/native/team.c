#include "team.h"

#include <sched.h>
#include <stddef.h>

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*count_function)(void);

static parallel_function parallel;
static count_function thread_number, thread_count;
static _Thread_local int in_team;

/* Takes the entry points of an OpenMP runtime. Without them there is one thread. */
void outrider_use_runtime(void *parallel_entry, void *number_entry, void *count_entry) {
    parallel = (parallel_function)parallel_entry;
    thread_number = (count_function)number_entry;
    thread_count = (count_function)count_entry;
}

typedef struct {
    void (*body)(void *);
    void *argument;
} job;

static void enter(void *argument) {
    const job *work = argument;
    in_team = 1;
    work->body(work->argument);
    in_team = 0;
}

void team_run(void (*body)(void *), void *argument, int64_t threads) {
    job work = {body, argument};
    if (parallel == NULL || threads <= 1) body(argument);
    else parallel(enter, &work, (unsigned)threads, 0);
}

int team_thread(void) { return in_team ? thread_number() : 0; }

int team_size(void) { return in_team ? thread_count() : 1; }

void team_wait(team_barrier *barrier, int32_t *sense) {
    const int size = team_size();
    if (size == 1) return;
    const int32_t turn = *sense = !*sense;
    if (__atomic_add_fetch(&barrier->waiting, 1, __ATOMIC_ACQ_REL) == size) {
        barrier->waiting = 0;
        __atomic_store_n(&barrier->sense, turn, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&barrier->sense, __ATOMIC_ACQUIRE) != turn; spins++) {
        if (spins > 1000) sched_yield(); /* The thread that we wait for may need this core. */
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#elif defined(__aarch64__)
        else __asm__ volatile("yield");
#endif
    }
}
