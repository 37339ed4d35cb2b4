/* The structures are those of the original's header, byte for byte, on 64-bit machines. */
#include <millstream.h>

#define IS(what, number) _Static_assert((what) == (number), #what)

IS(sizeof(struct transfer_request), 40);
IS(offsetof(struct transfer_request, opcode), 0);
IS(offsetof(struct transfer_request, source), 8);
IS(offsetof(struct transfer_request, target_id), 16);
IS(offsetof(struct transfer_request, target_offset), 24);
IS(offsetof(struct transfer_request, length), 32);
IS(sizeof(struct transfer_status), 16);
IS(offsetof(struct transfer_status, status), 0);
IS(offsetof(struct transfer_status, transferred_bytes), 8);
IS(sizeof(struct buffer_entry), 16);
IS(offsetof(struct buffer_entry, addr), 0);
IS(offsetof(struct buffer_entry, length), 8);
IS(sizeof(struct notify_msg), 16);
IS(offsetof(struct notify_msg, name), 0);
IS(offsetof(struct notify_msg, msg), 8);
IS(sizeof(struct nic_load_stat), 80);
IS(offsetof(struct nic_load_stat, device_name), 0);
IS(offsetof(struct nic_load_stat, inflight_bytes), 64);
IS(offsetof(struct nic_load_stat, ewma_bandwidth_bps), 72);
IS(sizeof(struct segment_desc), 48);
IS(offsetof(struct segment_desc, desc_), 8);
IS(offsetof(struct segment_desc, desc_.rdma.location), 24);
IS(offsetof(struct segment_desc, desc_.nvmeof.port), 40);
IS(sizeof(segment_id_t), 4);
IS(sizeof(segment_handle_t), 4);
IS(sizeof(batch_id_t), 8);
IS(sizeof(transfer_engine_t), sizeof(void *));
IS(sizeof(transport_t), sizeof(void *));
/* Ours stay as they are, too: programs that were compiled before go on. */
IS(sizeof(struct millstream_submit_options), 64);
IS(offsetof(struct millstream_submit_options, priority), 8);
IS(offsetof(struct millstream_submit_options, durable), 12);
IS(offsetof(struct millstream_submit_options, timeout_us), 16);
IS(offsetof(struct millstream_submit_options, transport), 24);
IS(offsetof(struct millstream_submit_options, policy), 32);
IS(offsetof(struct millstream_submit_options, intent), 40);
IS(offsetof(struct millstream_submit_options, notify_name), 48);
IS(offsetof(struct millstream_submit_options, notify_msg), 56);
IS(sizeof(struct millstream_local_path), 16);
IS(offsetof(struct millstream_local_path, server), 0);
IS(offsetof(struct millstream_local_path, path), 8);
IS(sizeof(struct millstream_file_options), 48);
IS(offsetof(struct millstream_file_options, name), 8);
IS(offsetof(struct millstream_file_options, length), 16);
IS(offsetof(struct millstream_file_options, local_paths), 24);
IS(offsetof(struct millstream_file_options, local_path_count), 32);
IS(offsetof(struct millstream_file_options, writable), 40);
IS(LOCAL_SEGMENT, 0);
IS(INVALID_BATCH, 0xffffffffffffffff);
IS(OPCODE_READ, 0);
IS(OPCODE_WRITE, 1);
IS(STATUS_WAITING, 0);
IS(STATUS_PENDING, 1);
IS(STATUS_INVALID, 2);
IS(STATUS_CANCELED, 3);
IS(STATUS_COMPLETED, 4);
IS(STATUS_TIMEOUT, 5);
IS(STATUS_FAILED, 6);

/* The types that programs for the original give their variables. */
int main(void)
{
    transfer_request_t request = {0};
    transfer_status_t status = {0};
    buffer_entry_t buffer = {0};
    notify_msg_t message = {0};
    segment_desc_t segment = {0};
    nic_load_stat_t load = {{0}, 0, 0};
    bool is_zero = request.length == 0 && status.status == 0 && buffer.length == 0 && !message.name;
    return is_zero && segment.type == 0 && load.inflight_bytes == 0 ? 0 : 1;
}
