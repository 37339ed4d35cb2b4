//! An allreduce over trees of many hosts, and the models beside it.

use core::time::Duration;

use millstream_sim::scenarios::inc_scale::run_point;
use millstream_sim::scenarios::{Outputs, Parameters, ScenarioError, run, run_with_outputs};

#[test]
fn more_hosts_take_hardly_more_time() {
    for bytes in [0, 4, 4 << 10, 64 << 10] {
        let times = [8, 27, 64, 512].map(|hosts| {
            let (point, report) = run_point(1, hosts, bytes);
            assert!(report.passed(), "{hosts} hosts, {bytes} bytes: {report}");
            assert_eq!((point.hosts, point.bytes), (hosts, bytes));
            point.simulated
        });
        let [few, .., many] = times;
        assert!(many <= 2 * few, "{bytes} bytes: {times:?}");
        // Up and down six links each.
        assert!(few >= Duration::from_micros(6), "{bytes} bytes: {times:?}");
    }
}

/// Links of 100 Gbit/s and 1 us; a packet of 4096 bytes has 102 bytes of headers.
#[test]
fn models_count_steps_latencies_and_bytes() {
    let nanos = Duration::from_nanos;
    let (point, _) = run_point(1, 8, 1 << 20);
    assert_eq!(point.fan_in, 2);
    // Pairs of neighbours are 2, 4, 2, 6, 2, 4 and 2 links apart, and a chunk is 32 packets.
    let chunk = 10_746;
    assert_eq!(point.ring, nanos(2 * (22_000 + 7 * chunk)));
    // Partners are 2, 4 and 6 links apart, for halves, quarters and eighths.
    assert_eq!(point.doubling, nanos(2 * (12_000 + 42_987 + 21_493 + chunk)));
    // All of it in each step is less.
    let (point, _) = run_point(1, 8, 4);
    assert_eq!(point.doubling, nanos(12_000 + 3 * 8));
}

#[test]
fn the_scenario_makes_a_table_and_no_capture() {
    let parameters = Parameters { hosts: Some(9), length: Some(100), ..Parameters::default() };
    let report = run("inc-scale", &parameters, None).unwrap();
    let again = run("inc-scale", &parameters, None).unwrap();
    assert!(report.passed(), "{report}");
    assert_eq!((report.bytes, report.digest), (900, again.digest));
    let table = report.table.unwrap();
    assert!(table.lines().count() == 3 && table.contains("\n      9       3      100 "), "{table}");
    let mut pcap = Vec::new();
    let outputs = Outputs { pcap: Some(&mut pcap), log: None };
    let error = run_with_outputs("inc-scale", &parameters, outputs).unwrap_err();
    assert!(matches!(error, ScenarioError::NoOutput("inc-scale")), "{error}");
}
