/* Writes to the memory that a target offers, reads it back, and compares: initiator NAME ADDRESS. */
#include <millstream.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char memory[1 << 20];

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, millstream_last_error());
    return 1;
}

/* Does one request, and waits for its end. */
static int transfer(transfer_engine_t engine, struct transfer_request request, notify_msg_t *message)
{
    batch_id_t batch = allocateBatchID(engine, 1);
    if (batch == INVALID_BATCH)
        return failed("no batch");
    int code = message ? submitTransferWithNotify(engine, batch, &request, 1, *message)
                       : submitTransfer(engine, batch, &request, 1);
    if (code != 0)
        return failed("not submitted");
    if (millstream_wait_batch(engine, batch, 10000) != 0)
        return failed("not done within 10 s");
    struct transfer_status status;
    if (getTransferStatus(engine, batch, 0, &status) != 0)
        return failed("no status");
    freeBatchID(engine, batch);
    if (status.status != STATUS_COMPLETED)
        return failed("the transfer failed");
    printf("%" PRIu64 " bytes\n", status.transferred_bytes);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: initiator NAME ADDRESS\n");
        return 2;
    }
    uint64_t address = strtoull(argv[2], NULL, 16);

    transfer_engine_t engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 0);
    if (!engine || !installTransport(engine, "tcp", NULL))
        return failed("no engine");
    if (registerLocalMemory(engine, memory, sizeof memory, "*", 0) != 0)
        return failed("no memory registered");
    segment_id_t segment = openSegment(engine, argv[1]);
    if (segment < 0)
        return failed("no segment");

    size_t length = 500000;
    for (size_t i = 0; i < length; i++)
        memory[i] = (char)('a' + i % 26);
    memory[26] = 0;

    struct transfer_request write = {OPCODE_WRITE, memory, segment, address, length};
    struct transfer_request read = {OPCODE_READ, memory + length, segment, address, length};
    notify_msg_t message = {"the initiator", "it is there"};
    if (transfer(engine, write, NULL) || transfer(engine, read, NULL))
        return 1;
    if (memcmp(memory, memory + length, length) != 0) {
        fprintf(stderr, "what was read is not what was written\n");
        return 1;
    }
    printf("the same\n");

    /* An error says what was wrong: a range that the target has not got. */
    struct transfer_request wrong = {OPCODE_WRITE, memory, segment, 4096, 10};
    if (transfer(engine, wrong, NULL) == 0)
        return 1;

    /* A message once this WRITE has arrived. */
    if (transfer(engine, write, &message))
        return 1;

    closeSegment(engine, segment);
    unregisterLocalMemory(engine, memory);
    destroyTransferEngine(engine);
    return 0;
}
