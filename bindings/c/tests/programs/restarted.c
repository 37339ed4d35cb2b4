/* A target is killed and started again under its name: requests fail, and once its segment is asked for anew they arrive. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define LENGTH 4096

static char memory[LENGTH];

/* Says where its memory is, and, when it is asked, what its first byte is. */
static int target(const char *uri)
{
    char line[16];
    transfer_engine_t engine = createTransferEngine(uri, "restarted-target", "127.0.0.1", 0, 0);
    CHECK(engine && installTransport(engine, "tcp", NULL));
    CHECK(registerLocalMemory(engine, memory, LENGTH, "*", 1) == 0);
    printf("%p\n", (void *)memory);
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        printf("%d\n", memory[0]);
        fflush(stdout);
    }
    return 0;
}

struct process {
    pid_t pid;
    FILE *in, *out;
    void *at;
};

static struct process start(const char *program, const char *uri)
{
    int in[2], out[2];
    struct process process;
    CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
    process.pid = fork();
    CHECK(process.pid >= 0);
    if (process.pid == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        execl(program, program, uri, "target", (char *)NULL);
        _exit(1);
    }
    close(in[0]);
    close(out[1]);
    process.in = fdopen(in[1], "w");
    process.out = fdopen(out[0], "r");
    CHECK(process.in && process.out && fscanf(process.out, "%p", &process.at) == 1);
    return process;
}

static int first_byte(struct process *process)
{
    int byte = -1;
    fprintf(process->in, "?\n");
    fflush(process->in);
    CHECK(fscanf(process->out, "%d", &byte) == 1);
    return byte;
}

static void end(struct process *process)
{
    CHECK(kill(process->pid, SIGKILL) == 0 && waitpid(process->pid, NULL, 0) == process->pid);
    fclose(process->in);
    fclose(process->out);
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    if (argc > 2)
        return target(argv[1]);
    struct process first = start(argv[0], argv[1]);
    transfer_engine_t engine = createTransferEngine(argv[1], "restarted-initiator", "127.0.0.1", 0, 0);
    CHECK(engine && installTransport(engine, "tcp", NULL));
    CHECK(registerLocalMemory(engine, memory, LENGTH, "*", 1) == 0);
    segment_id_t segment = openSegment(engine, "restarted-target");
    CHECK(segment > 0);
    memory[0] = 1;
    CHECK(transfer(engine, OPCODE_WRITE, memory, segment, first.at, LENGTH) == STATUS_COMPLETED);
    CHECK(first_byte(&first) == 1);

    /* Nobody is there. */
    end(&first);
    CHECK(transfer(engine, OPCODE_WRITE, memory, segment, first.at, LENGTH) == STATUS_FAILED);
    CHECK(*millstream_last_error());

    /* Another one is: addresses of the first mean nothing there, and are not used. */
    struct process second = start(argv[0], argv[1]);
    memory[0] = 2;
    CHECK(transfer(engine, OPCODE_WRITE, memory, segment, first.at, LENGTH) == STATUS_FAILED);
    CHECK(first_byte(&second) == 0);
    CHECK(openSegmentNoCache(engine, "restarted-target") == segment);
    CHECK(transfer(engine, OPCODE_WRITE, memory, segment, second.at, LENGTH) == STATUS_COMPLETED);
    CHECK(first_byte(&second) == 2);
    memory[0] = 0;
    CHECK(transfer(engine, OPCODE_READ, memory, segment, second.at, LENGTH) == STATUS_COMPLETED);
    CHECK(memory[0] == 2);
    end(&second);
    destroyTransferEngine(engine);
    return 0;
}
