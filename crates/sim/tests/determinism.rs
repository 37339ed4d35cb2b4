//! The same seed is the same run, packet for packet; another seed is another.

use std::io::Write;

use millstream_sim::scenarios::{NAMES, Outputs, Parameters, Report, run, run_with_outputs};

fn recorded(name: &str, seed: u64) -> (Report, Vec<u8>, Vec<u8>) {
    let (mut pcap, mut log) = (Vec::new(), Vec::new());
    let outputs =
        Outputs { pcap: Some(&mut pcap as &mut dyn Write), log: Some(&mut log as &mut dyn Write) };
    let parameters = Parameters { seed, ..Parameters::default() };
    let report = run_with_outputs(name, &parameters, outputs).unwrap();
    (report, pcap, log)
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for name in ["allreduce", "transfer", "swarm"] {
        let (first, first_pcap, first_log) = recorded(name, 7);
        let (second, second_pcap, second_log) = recorded(name, 7);
        assert!(first.passed(), "{first}");
        assert_eq!(first.digest, second.digest, "{name}");
        assert_eq!(first.to_string(), second.to_string(), "{name}");
        // Not assert_eq: megabytes say nothing in a message.
        assert!(first_pcap == second_pcap, "{name}");
        assert!(first_log == second_log, "{name}");
        assert!(first_pcap.len() > 1000 && first_log.len() > 1000, "{name}");
    }
}

#[test]
fn another_seed_gives_another_run() {
    for name in ["allreduce", "transfer", "swarm"] {
        let (first, first_pcap, _) = recorded(name, 7);
        let (second, second_pcap, _) = recorded(name, 8);
        assert_ne!(first.digest, second.digest, "{name}");
        assert!(first_pcap != second_pcap, "{name}");
    }
}

#[test]
fn recording_a_run_does_not_change_it() {
    for name in ["allreduce", "transfer", "swarm"] {
        let parameters = Parameters { seed: 7, ..Parameters::default() };
        let bare = run(name, &parameters, None).unwrap();
        assert_eq!(bare.digest, recorded(name, 7).0.digest, "{name}");
    }
}

#[test]
fn the_log_has_one_line_for_each_event() {
    let (report, _, log) = recorded("transfer", 7);
    let log = String::from_utf8(log).unwrap();
    let count = |what: &str| log.lines().filter(|line| line[26..].starts_with(what)).count() as u64;
    assert_eq!(count("sent "), report.network.sent);
    assert_eq!(count("lost "), report.network.lost);
    assert_eq!(count("delivered "), report.network.delivered);
    assert!(report.network.lost > 0);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let refused = |name: &str, change: fn(&mut Parameters)| {
        let mut parameters = Parameters::default();
        change(&mut parameters);
        run(name, &parameters, None).unwrap_err().to_string()
    };
    assert_eq!(
        refused("nonsense", |_| ()),
        format!("there is no scenario \"nonsense\": choose one of {NAMES:?}")
    );
    assert_eq!(refused("transfer", |p| p.loss = 1.5), "loss = 1.5 is out of range: 0 to 1");
    assert_eq!(
        refused("transfer", |p| p.corrupt = f64::NAN),
        "corrupt = NaN is out of range: 0 to 1"
    );
    assert_eq!(refused("allreduce", |p| p.hosts = Some(65)), "hosts = 65 is out of range: 1 to 64");
    assert_eq!(refused("allreduce", |p| p.hosts = Some(0)), "hosts = 0 is out of range: 1 to 64");
    let mut pcap = Vec::new();
    let error = run("grid", &Parameters::default(), Some(&mut pcap)).unwrap_err();
    assert!(error.to_string().contains("many runs"), "{error}");
}

#[test]
fn a_capture_that_cannot_be_written_is_an_error() {
    /// A disk that is full after so many bytes.
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    for room in [0, 1000] {
        let error = run("transfer", &Parameters::default(), Some(&mut Full(room))).unwrap_err();
        assert!(error.to_string().contains("cannot be written"), "{error}");
    }
}
