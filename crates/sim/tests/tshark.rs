//! Wireshark's dissector, which knows nothing of us, reads our captures.

use std::process::Command;

use millstream_sim::scenarios::transfer::{Transfer, TransferOptions};
use millstream_sim::scenarios::{Parameters, run};

/// Whether the program is there. A test that cannot run says so; when all are required, it fails.
fn tshark_is_there() -> bool {
    let there = Command::new("tshark").arg("--version").output().is_ok();
    if !there {
        let required = std::env::var_os("MILLSTREAM_REQUIRE").is_some_and(|value| value == "all");
        assert!(!required, "tshark is not installed, and MILLSTREAM_REQUIRE=all");
        println!("skipped: tshark is not installed");
    }
    there
}

/// The given fields of every packet, one line each, separated by tabs.
fn fields(name: &str, pcap: &[u8], fields: &[&str]) -> Vec<String> {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.pcap"));
    std::fs::write(&path, pcap).unwrap();
    let mut command = Command::new("tshark");
    command.arg("-r").arg(&path).args(["-T", "fields"]);
    // Checked only when asked for.
    command.args(["-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE"]);
    fields.iter().for_each(|field| _ = command.args(["-e", field]));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn check(name: &str, pcap: &[u8], sent: u64) {
    let lines = fields(
        name,
        pcap,
        &["frame.protocols", "_ws.malformed", "_ws.expert.severity", "_ws.expert.message"],
    );
    assert_eq!(lines.len() as u64, sent);
    for (number, line) in lines.iter().enumerate() {
        let columns: Vec<&str> = line.split('\t').collect();
        assert!(columns[0].contains("infiniband"), "packet {}: {line}", number + 1);
        assert_eq!(columns[1..], ["", "", ""], "packet {}: {line}", number + 1);
    }
}

#[test]
fn tshark_finds_no_malformed_packet() {
    if !tshark_is_there() {
        return;
    }
    for name in ["allreduce", "transfer"] {
        for seed in 0..3 {
            let mut pcap = Vec::new();
            let parameters = Parameters { seed, ..Parameters::default() };
            let report = run(name, &parameters, Some(&mut pcap)).unwrap();
            check(name, &pcap, report.network.sent);
        }
    }
}

#[test]
fn tshark_finds_no_malformed_packet_over_ipv6() {
    if !tshark_is_there() {
        return;
    }
    let mut pcap = Vec::new();
    // See the scenario `transfer`.
    let options = TransferOptions { ipv6: true, length_unit: 64, ..TransferOptions::default() };
    let mut transfer = Transfer::new(&options);
    transfer.simulation.capture(&mut pcap).unwrap();
    transfer.run();
    transfer.simulation.finish().unwrap();
    let sent = transfer.report("test", 1).network.sent;
    drop(transfer);
    check("ipv6", &pcap, sent);
}

#[test]
fn tshark_reads_what_was_sent() {
    if !tshark_is_there() {
        return;
    }
    let mut pcap = Vec::new();
    run("transfer", &Parameters::default(), Some(&mut pcap)).unwrap();
    let lines = fields(
        "fields",
        &pcap,
        &[
            "frame.time_epoch",
            "ip.src",
            "udp.dstport",
            "infiniband.bth.opcode",
            "infiniband.bth.p_key",
        ],
    );
    let first: Vec<&str> = lines[0].split('\t').collect();
    assert_eq!(first[0].trim_end_matches('0'), "0.");
    assert_eq!(first[1..3], ["10.0.0.1", "4791"]);
    assert!(lines.iter().all(|line| line.ends_with("\t65535") || line.ends_with("0xffff")));
    // Times have nanoseconds and never go back.
    let times: Vec<&str> = lines.iter().map(|line| line.split('\t').next().unwrap()).collect();
    assert!(times.iter().any(|time| !time.ends_with("000")));
    let seconds: Vec<f64> = times.iter().map(|time| time.parse().unwrap()).collect();
    assert!(seconds.is_sorted());
}
