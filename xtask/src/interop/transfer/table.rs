//! Which of the transfer engine's tests always run in the guest, and which never do and why.

use anyhow::{Result, bail};

/// Those that run whenever rows do: they took 51 s on a busy machine of two cores. All others run with `--only transfer`.
pub(super) const ALWAYS: &[&str] = &[
    "cut_links::a_batch_goes_on_when_a_link_here_is_cut",
    "ending::a_canceled_write_does_not_arrive_later",
    "failures::gone::a_peer_that_dies_half_way_fails_the_task_and_is_named",
    "failures::gone::memory_that_a_peer_took_back_fails_only_the_tasks_that_use_it",
    "failures::silence::a_peer_whose_queue_pair_does_not_answer_is_gone",
    "fences::nothing_arrives_after_a_fence_was_confirmed",
    "rdma::nothing_beyond_a_request_is_touched",
    "rdma::several_devices_share_the_work",
    "restart::who_opens_the_segment_again_after_a_restart_is_served",
];

/// A part of the suite that is not for devices of the system.
struct NotRun {
    why: &'static str,
    /// Tests, or whole files.
    tests: &'static [&'static str],
}

const NOT_RUN: &[NotRun] = &[
    NotRun {
        why: "no RDMA device takes part",
        tests: &[
            "local",
            "nvmeof",
            "semantics",
            "shm::a_batch_goes_on_over_tcp_when_its_target_shares_no_memory_any_more",
            "shm::a_segment_that_no_transport_reached_is_tried_again",
            "shm::bad_requests_have_the_codes_of_other_transports",
            "shm::bytes_arrive_in_another_process_and_come_back",
            "shm::engines_end_while_others_write",
            "shm::it_is_installed_once_and_also_after_memory",
            "shm::memory_that_a_stopped_process_accesses_is_not_unregistered",
            "shm::memory_that_was_unregistered_is_noticed_and_the_next_descriptor_believed",
            "shm::nothing_is_written_after_unregistration",
            "shm::tasks_of_a_process_that_is_killed_fail_within_a_second",
            "shm::what_is_not_shared_is_refused_with_the_reason",
            "shm::where_the_kernel_refuses_to_copy_bytes_go_over_tcp_and_the_reason_is_told",
            "unmapped::copies_between_processes_fail_alone",
            "unmapped::copies_within_an_engine_fail_alone",
        ],
    },
    NotRun {
        why: "a role of processes that other tests start: by itself it tests nothing",
        tests: &[
            "initiators::a_node",
            "initiators::an_initiator",
            "killed::a_node",
            "many_killed::peers",
            "shm::a_role",
        ],
    },
    NotRun { why: "the guest has no GPU", tests: &["cuda"] },
    NotRun {
        why: "the guest has one processor: who looks for an answer keeps it from who answers",
        tests: &["tcp::busy_poll::requests_one_after_the_other_have_nobody_sleep"],
    },
    NotRun {
        why: "the guest has no files of this repository",
        tests: &["metrics::the_manual_has_a_row_for_each_metric"],
    },
    NotRun {
        why: "the relay between the two ends passes what soft devices send, by addresses of its own",
        tests: &[
            "control_port::a_stranger_at_an_address_of_a_nic_says_nothing_of_the_peer",
            "fail_over",
            "late",
            "other_transport",
            "relayed",
        ],
    },
    NotRun {
        why: "the partitions of devices are the fabric's: soft-RoCE has one",
        tests: &["config::engines_of_one_partition_reach_each_other_and_no_others"],
    },
    NotRun {
        why: "a soft device's socket is what is in the way",
        tests: &["errors::an_address_that_another_has_to_itself_is_no_soft_device"],
    },
    NotRun {
        why: "the kernel goes on answering for the device of a process that is stopped: nothing is silent",
        tests: &[
            "killed::a_process_that_stands_still_for_long_is_found_again",
            "killed::what_a_silent_process_was_sent_is_undefined_and_it_is_found_again",
            "many_killed::peers_that_are_stopped_at_once_hold_up_nobody",
        ],
    },
    NotRun {
        why: "pages stay pinned while they are registered: taking them away hinders no device",
        tests: &[
            "unmapped::requests_of_pieces_fail_with_any_of_them",
            "unmapped::work_requests_of_soft_devices_fail_alone",
        ],
    },
    NotRun {
        why: "each region of soft-RoCE takes 8 KiB of the kernel's memory: 65,536 are all that the guest has",
        tests: &["registration::many_pieces_of_memory_are_registered_and_used"],
    },
];

/// Why a test, `FILE::TEST`, is not run, if so.
pub(super) fn why_not(test: &str) -> Option<&'static str> {
    NOT_RUN
        .iter()
        .find(|part| part.tests.iter().any(|name| covers(name, test)))
        .map(|part| part.why)
}

fn covers(name: &str, test: &str) -> bool {
    name == test || test.split_once("::").is_some_and(|(file, _)| file == name)
}

/// Fails when the tables name what is not among these tests.
pub(super) fn check(tests: &[&str]) -> Result<()> {
    let named = ALWAYS.iter().chain(NOT_RUN.iter().flat_map(|part| part.tests));
    let is_there = |name: &&&str| tests.iter().any(|test| covers(name, test));
    let missing: Vec<_> = named.filter(|name| !is_there(name)).copied().collect();
    if !missing.is_empty() {
        bail!("xtask/src/interop/transfer/table.rs names what is no test: {}", missing.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_cover_their_tests_and_names_that_are_gone_are_found() {
        assert!(why_not("nvmeof::anything").is_some() && why_not("rdma::anything").is_none());
        assert!(ALWAYS.iter().all(|test| why_not(test).is_none()));
        let error = check(&["late::x", "local::x"]).unwrap_err().to_string();
        assert!(error.contains(" semantics,") && !error.contains(" local,"), "{error}");
    }
}
