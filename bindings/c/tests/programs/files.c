/* Files that an engine offers and another one reaches. The argument is a folder with "offered" and "mapped". */
#include "check.h"

#define LENGTH 65536

static char local[LENGTH], expected[LENGTH];

static transfer_engine_t new_initiator(const char *const *settings, size_t count)
{
    transfer_engine_t engine = millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, settings, count);
    CHECK(engine && installTransport(engine, "nvmeof", NULL));
    CHECK(registerLocalMemory(engine, local, LENGTH, "*", 1) == 0);
    return engine;
}

/* The whole of a file is as expected. */
static void read_back(transfer_engine_t engine, segment_id_t segment)
{
    memset(local, 0, LENGTH);
    CHECK(transfer(engine, OPCODE_READ, local, segment, NULL, LENGTH) == STATUS_COMPLETED);
    CHECK(memcmp(local, expected, LENGTH) == 0);
}

static segment_id_t open_file(transfer_engine_t engine, const char *name)
{
    segment_id_t segment = openSegment(engine, name);
    CHECK(segment > 0);
    return segment;
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    char offered[1024], mapped[1024], missing[1024], folders[1100], name[512], other[512];
    snprintf(offered, sizeof offered, "%s/offered", arguments[1]);
    snprintf(mapped, sizeof mapped, "%s/mapped", arguments[1]);
    snprintf(missing, sizeof missing, "%s/missing", arguments[1]);
    snprintf(folders, sizeof folders, "nvmeof.mapped_folders=%s", arguments[1]);
    transfer_engine_t target = new_engine("nvmeof"), initiator = new_initiator(NULL, 0);

    /* Where its name has no place, it is not offered. */
    struct millstream_file_options options = {.size = sizeof options, .writable = 1};
    CHECK(millstream_register_file(target, offered, &options, name, 8) == -1);
    CHECK(strstr(millstream_last_error(), "segment_len is 8"));
    CHECK(millstream_register_file(target, missing, &options, name, sizeof name) == -1);
    CHECK(strstr(millstream_last_error(), missing) && strstr(millstream_last_error(), "No such file"));
    CHECK(millstream_register_file(target, offered, &options, name, sizeof name) == 0);
    CHECK(strncmp(name, "nvmeof/127.0.0.1:", 17) == 0 && strcmp(strrchr(name, '/'), "/offered") == 0);
    CHECK(millstream_register_file(target, offered, &options, other, sizeof other) == -7);

    /* What is written is there, and nothing else. */
    segment_id_t segment = open_file(initiator, name);
    memset(expected, 1, LENGTH);
    read_back(initiator, segment);
    memset(expected + 100, 7, 5000);
    memset(local, 7, LENGTH);
    CHECK(transfer(initiator, OPCODE_WRITE, local, segment, (void *)100, 5000) == STATUS_COMPLETED);
    read_back(initiator, segment);

    /* Only for reading, only a part, and by another name. */
    struct millstream_local_path places[] = {{"elsewhere", "/nowhere"}, {"shop", mapped}};
    struct millstream_file_options more = {
        .size = sizeof more, .name = "part", .length = 4096, .local_paths = places, .local_path_count = 2};
    CHECK(millstream_register_file(target, offered, &more, other, sizeof other) == 0);
    CHECK(strcmp(strrchr(other, '/'), "/part") == 0);
    segment_id_t part = open_file(initiator, other);
    CHECK(transfer(initiator, OPCODE_WRITE, local, part, NULL, 4096) == STATUS_FAILED);
    CHECK(transfer(initiator, OPCODE_READ, local, part, (void *)4096, 1) == STATUS_FAILED);
    CHECK(transfer(initiator, OPCODE_READ, local, part, NULL, 4096) == STATUS_COMPLETED);
    CHECK(memcmp(local, expected, 4096) == 0);

    /* A server that has it, and may open it, does so. */
    const char *settings[] = {"nvmeof.server_name=shop", folders};
    transfer_engine_t shop = new_initiator(settings, 2), stranger = new_initiator(settings + 1, 1);
    CHECK(transfer(stranger, OPCODE_READ, local, open_file(stranger, other), NULL, 4096) == STATUS_COMPLETED);
    CHECK(memcmp(local, expected, 4096) == 0);
    memset(expected, 2, 4096);
    CHECK(transfer(shop, OPCODE_READ, local, open_file(shop, other), NULL, 4096) == STATUS_COMPLETED);
    CHECK(memcmp(local, expected, 4096) == 0);
    destroyTransferEngine(shop);
    destroyTransferEngine(stranger);

    CHECK(millstream_unregister_file(target, name) == 0);
    CHECK(millstream_unregister_file(target, name) == -3);
    CHECK(transfer(initiator, OPCODE_READ, local, segment, NULL, LENGTH) == STATUS_FAILED);
    destroyTransferEngine(initiator);
    destroyTransferEngine(target);
    return 0;
}
