/*
 * In place of libibverbs: it has devices, NAMES, none of which can be opened, and says on stderr when somebody lists them, and which
 * of them somebody tries to open. So tests see which devices a program asks for, on machines that have none.
 */
#include <errno.h>
#include <stddef.h>
#include <stdio.h>

static const char *const names[] = {NAMES};

/* A device is its name. */
const char **ibv_get_device_list(int *count)
{
    static const char *list[sizeof names / sizeof *names + 1];
    fprintf(stderr, "lists\n");
    *count = sizeof names / sizeof *names;
    for (int i = 0; i < *count; i++)
        list[i] = names[i];
    return list;
}

void ibv_free_device_list(const char **list)
{
    (void)list;
}

const char *ibv_get_device_name(const char *device)
{
    return device;
}

void *ibv_open_device(const char *device)
{
    fprintf(stderr, "opens %s\n", device);
    errno = ENODEV;
    return NULL;
}

/* What is looked up, and called only where a device was opened. */
#define UNUSED(name) \
    int name(void)   \
    {                \
        return -1;   \
    }

UNUSED(ibv_close_device)
UNUSED(ibv_query_device)
UNUSED(ibv_query_port)
UNUSED(ibv_query_gid)
UNUSED(ibv_get_async_event)
UNUSED(ibv_ack_async_event)
UNUSED(ibv_alloc_pd)
UNUSED(ibv_dealloc_pd)
UNUSED(ibv_reg_mr)
UNUSED(ibv_dereg_mr)
UNUSED(ibv_create_comp_channel)
UNUSED(ibv_destroy_comp_channel)
UNUSED(ibv_get_cq_event)
UNUSED(ibv_ack_cq_events)
UNUSED(ibv_create_cq)
UNUSED(ibv_destroy_cq)
UNUSED(ibv_create_ah)
UNUSED(ibv_destroy_ah)
UNUSED(ibv_create_srq)
UNUSED(ibv_modify_srq)
UNUSED(ibv_destroy_srq)
UNUSED(ibv_create_qp)
UNUSED(ibv_modify_qp)
UNUSED(ibv_query_qp)
UNUSED(ibv_destroy_qp)
