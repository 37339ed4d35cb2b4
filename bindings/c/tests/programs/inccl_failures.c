/* Ranks that are lost, late or leave: WHAT WORLD_SIZE CONTROLLER RANK. Prints "ready" when the communicator is there,
 * and goes on when its stdin has ended. */
#define _POSIX_C_SOURCE 200809L
#include "inccl_check.h"
#include <pthread.h>
#include <unistd.h>

static int32_t vector[100000];

/* Calls a collective, and says how it ended. */
static void *call(void *comm)
{
    int code = inccl_allreduce_v2(comm, vector, vector, 100000, INCCL_INT32, INCCL_SUM);
    printf("%d %s\n", code, inccl_last_error());
    return NULL;
}

/* Waits for the end of one that was started. */
static void *wait_for(void *handle)
{
    int code = inccl_wait_v2(*(inccl_handle_t *)handle, 60000);
    printf("%d %s\n", code, inccl_last_error());
    return NULL;
}

int main(int argc, char **argv)
{
    CHECK(argc == 5);
    const char *what = argv[1];
    int rank = atoi(argv[4]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct inccl_group *group = inccl_group_create(atoi(argv[2]), argv[3], rank);
    if (!group) {
        printf("no group: %s\n", inccl_last_error());
        return 1;
    }
    struct inccl_communicator *comm = inccl_communicator_create(group);
    CHECK(comm);
    puts("ready");
    while (getchar() != EOF)
        ;
    if (strcmp(what, "void") == 0) {
        inccl_allreduce_write(comm, vector, 100000, vector);
    } else if (strcmp(what, "sleep") == 0) {
        pause();
    } else if (strcmp(what, "destroy") == 0) {
        /* While another thread waits. */
        pthread_t thread;
        inccl_handle_t handle;
        struct inccl_call it = {INCCL_ALLREDUCE, INCCL_INT32, INCCL_SUM, 0, 0, 100000, vector, vector};
        GOOD(inccl_start_v2(comm, &it, &handle));
        CHECK(pthread_create(&thread, NULL, wait_for, &handle) == 0);
        inccl_communicator_destroy(comm);
        CHECK(pthread_join(thread, NULL) == 0);
        return 0;
    } else if (strcmp(what, "cancel") == 0) {
        inccl_handle_t handle;
        struct inccl_call it = {INCCL_ALLREDUCE, INCCL_INT32, INCCL_SUM, 0, 0, 100000, vector, vector};
        GOOD(inccl_start_v2(comm, &it, &handle));
        CHECK(inccl_wait_v2(handle, 50) == INCCL_IN_PROGRESS);
        CHECK(inccl_test_v2(handle) == INCCL_IN_PROGRESS);
        GOOD(inccl_cancel_v2(handle));
        wait_for(&handle);
    } else {
        call(comm);
    }
    inccl_communicator_destroy(comm);
    inccl_group_destroy(group);
    return 0;
}
