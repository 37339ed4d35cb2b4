/* A process that was forked off has codes for the engines of the other, which goes on whatever becomes of the first. */
#include "check.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static char memory[4096];

static void child(transfer_engine_t engine, batch_id_t batch)
{
    char text[256];
    struct transfer_status status;
    CHECK(getLocalIpAndPort(engine, text, sizeof text) == -202);
    CHECK(strstr(millstream_last_error(), "forked"));
    CHECK(registerLocalMemory(engine, memory, sizeof memory, "*", 1) == -202);
    CHECK(openSegment(engine, "127.0.0.1:1") == -1);
    CHECK(getTransferStatus(engine, batch, 0, &status) == 202);
    CHECK(allocateBatchID(engine, 1) == INVALID_BATCH);
    destroyTransferEngine(engine);
}

int main(void)
{
    int status = 0;
    transfer_engine_t engine = new_engine("tcp");
    CHECK(registerLocalMemory(engine, memory, sizeof memory, "*", 1) == 0);
    batch_id_t batch = allocateBatchID(engine, 1);
    enableGracefulShutdown(engine);

    /* One that ends by exit, with what was to be done then. */
    pid_t first = fork();
    CHECK(first >= 0);
    if (first == 0) {
        child(engine, batch);
        exit(7);
    }
    CHECK(waitpid(first, &status, 0) == first && WIFEXITED(status) && WEXITSTATUS(status) == 7);

    /* One that is told to end: this is not said to the other. */
    pid_t second = fork();
    CHECK(second >= 0);
    if (second == 0) {
        for (;;)
            pause();
    }
    CHECK(kill(second, SIGTERM) == 0);
    CHECK(waitpid(second, &status, 0) == second && WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);

    CHECK(transfer(engine, OPCODE_WRITE, memory, LOCAL_SEGMENT, memory + 2000, 100) == STATUS_COMPLETED);
    CHECK(freeBatchID(engine, batch) == 0);
    destroyTransferEngine(engine);
    return 0;
}
