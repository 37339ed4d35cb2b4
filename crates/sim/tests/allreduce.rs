//! Sums are exact on every rank, or every rank hears why there is none.

use core::time::Duration;

use millstream_inc::CollectiveError;
use millstream_roce::Instant;
use millstream_sim::scenarios::allreduce::{AllReduceOptions, Reduction};
use millstream_sim::scenarios::{Parameters, run};
use millstream_sim::{ConnectionOptions, LinkOptions, Probability};

fn faulty(per_mille: u32) -> LinkOptions {
    LinkOptions {
        loss: Probability::per_mille(per_mille),
        duplicate: Probability::per_mille(per_mille),
        reorder: Probability::per_mille(per_mille),
        corrupt: Probability::per_mille(1),
        ..LinkOptions::default()
    }
}

fn exact(options: &AllReduceOptions) {
    let mut reduction = Reduction::new(options);
    reduction.run();
    let failures: Vec<_> = reduction.failures().collect();
    let report = reduction.report();
    assert!(report.passed() && failures.is_empty(), "{report}\n{failures:?}\n{options:?}");
}

#[test]
fn every_fan_in() {
    for hosts in 1..=64 {
        let counts = vec![0, 1, 1025, 5000];
        exact(&AllReduceOptions {
            seed: hosts.into(),
            hosts,
            counts,
            link: faulty(10),
            ..AllReduceOptions::default()
        });
    }
}

#[test]
fn under_ten_percent_of_everything() {
    for seed in 0..20 {
        for in_place in [false, true] {
            exact(&AllReduceOptions {
                seed,
                in_place,
                link: faulty(100),
                call_limit: Duration::from_secs(60),
                ..AllReduceOptions::default()
            });
        }
    }
}

#[test]
fn many_segments_in_a_small_window() {
    exact(&AllReduceOptions {
        hosts: 4,
        counts: vec![100_000, 99_999],
        window: 1,
        segment_bytes: 1024,
        link: faulty(5),
        call_limit: Duration::from_secs(60),
        ..AllReduceOptions::default()
    });
}

#[test]
fn ranks_that_come_late_are_waited_for() {
    exact(&AllReduceOptions {
        pause: Duration::from_millis(500),
        link: faulty(10),
        ..AllReduceOptions::default()
    });
}

#[test]
fn the_default_scenario_has_exact_sums() {
    for seed in 0..20 {
        let parameters =
            Parameters { seed, loss: 0.1, duplicate: 0.1, reorder: 0.1, ..Parameters::default() };
        let report = run("allreduce", &parameters, None).unwrap();
        assert!(report.passed(), "{report}");
    }
}

/// Calls long enough that the crash falls into one of them.
fn long_calls() -> AllReduceOptions {
    AllReduceOptions {
        hosts: 5,
        counts: vec![1 << 20; 2],
        connection: ConnectionOptions { timeout: 14, reads: 0, ..ConnectionOptions::default() },
        ..AllReduceOptions::default()
    }
}

const CRASH_AT: Instant = Instant::from_nanos(2_000_000);
/// Within which every rank hears of a death.
const BOUND: Duration = Duration::from_secs(5);

fn errors(reduction: &mut Reduction<'_>) -> Vec<(usize, CollectiveError)> {
    reduction.run();
    let report = reduction.report();
    assert!(report.passed(), "{report}");
    let late = |at: Instant| at.saturating_duration_since(CRASH_AT) > BOUND;
    let failures: Vec<_> = reduction.failures().collect();
    assert!(!failures.iter().any(|(_, at, _)| late(*at)), "{failures:?}");
    failures.into_iter().map(|(rank, _, error)| (rank, error)).collect()
}

#[test]
fn when_a_host_dies_every_other_rank_hears_of_it_in_time() {
    let mut reduction = Reduction::new(&long_calls());
    let dead = reduction.hosts[2];
    reduction.simulation.crash(dead, CRASH_AT);
    let errors = errors(&mut reduction);
    let ranks: Vec<usize> = errors.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(ranks, [0, 1, 3, 4]);
    for (rank, error) in errors {
        assert!(matches!(error, CollectiveError::Aborted(_)), "rank {rank}: {error}");
        assert!(error.to_string().contains("rank 2"), "rank {rank}: {error}");
    }
    assert!(!reduction.switch_events().is_empty());
}

#[test]
fn when_the_switch_dies_every_rank_hears_of_it_in_time() {
    let mut reduction = Reduction::new(&long_calls());
    let switch = reduction.switch;
    reduction.simulation.crash(switch, CRASH_AT);
    let errors = errors(&mut reduction);
    assert_eq!(errors.len(), 5);
}

#[test]
fn when_the_switch_comes_back_without_memory_every_rank_hears_of_it_in_time() {
    let mut reduction = Reduction::new(&long_calls());
    let switch = reduction.switch;
    reduction.simulation.crash(switch, CRASH_AT);
    reduction.simulation.restart(switch, CRASH_AT + Duration::from_millis(1));
    let errors = errors(&mut reduction);
    assert_eq!(errors.len(), 5);
}

#[test]
fn a_short_partition_of_one_host_is_survived() {
    let mut reduction = Reduction::new(&long_calls());
    let links = reduction.links[3];
    reduction.simulation.partition(&links, CRASH_AT, CRASH_AT + Duration::from_millis(300));
    assert_eq!(errors(&mut reduction), []);
}
