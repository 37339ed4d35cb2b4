/* What the test programs of INCCL share. */
#ifndef INCCL_CHECK_H
#define INCCL_CHECK_H

#include <inccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__,          \
                    #condition, inccl_last_error());                                             \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

#define GOOD(call) CHECK((call) == INCCL_SUCCESS)

#endif
