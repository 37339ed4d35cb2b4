//! What others see of us on the wire: tshark takes every packet for well-formed RoCEv2.

mod common;

use std::fs;
use std::process::{Command, Stdio};

use common::{Folder, Running, eventually, is_installed, millstream, node, skip, transfer};

/// Why loopback cannot be captured here.
fn obstacle() -> Option<&'static str> {
    let root = fs::metadata("/proc/self").is_ok_and(|own| {
        use std::os::unix::fs::MetadataExt;
        own.uid() == 0
    });
    if !root {
        Some("captures need root")
    } else if !is_installed("tcpdump") {
        Some("tcpdump is not installed")
    } else if !is_installed("tshark") {
        Some("tshark is not installed")
    } else {
        None
    }
}

fn tshark(file: &str, arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new("tshark");
    let output = command.args(["-n", "-r", file]).args(arguments).stderr(Stdio::null()).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn packets_of_a_run_without_segmentation_offload_are_well_formed() {
    if let Some(reason) = obstacle() {
        return skip(reason);
    }
    let folder = Folder::new();
    let (capture, file) = (folder.file("capture.pcap"), folder.file("file"));
    fs::write(&file, common::bytes(300_000, 1)).unwrap();
    let (_node, segment) = node("1MiB", &["--no-segmentation-offload"]);
    let host = segment.split(':').next().unwrap();
    let filter = format!("udp port 4791 and host {host}");
    let mut command = Command::new("tcpdump");
    // Immediate mode reserves room for the longest packet for each: with the default of 256 KiB,
    // few fit the buffer.
    command.args(["-i", "lo", "-n", "-U", "--immediate-mode", "-s", "8192", "-B", "65536"]);
    let tcpdump = Running::start("tcpdump", command.args(["-Z", "root", "-w", &capture, &filter]));
    let recorded = || fs::metadata(&capture).map_or(0, |file| file.len());
    // It writes the head of the file when it listens.
    eventually("tcpdump captures", || recorded() >= 24);

    let more = ["--offset=0", "--no-segmentation-offload"];
    let back = ["--length=300000", &folder.file("back")];
    // A busy machine may lose some of what it captures, so until there is enough.
    eventually("the bytes of both ways are captured", || {
        transfer(&["put"], &segment, &[&more[..], &[&file]].concat()).success();
        transfer(&["get"], &segment, &[&more[..], &back].concat()).success();
        recorded() > 600_000
    });
    tcpdump.signal("INT");
    tcpdump.output();

    let packets = tshark(&capture, &["-T", "fields", "-e", "frame.protocols"]);
    assert!(packets.len() > 150, "300,000 bytes at 4096 a packet, twice: {}", packets.len());
    for protocols in &packets {
        assert!(protocols.contains("udp:infiniband"), "{protocols}");
    }
    assert_eq!(tshark(&capture, &["-Y", "_ws.malformed"]), [""; 0]);
    // RDMA WRITE Only is opcode 10, as a slice is sent as one message for each packet; READ Request 12.
    for opcode in ["10", "12"] {
        let filter = format!("infiniband.bth.opcode == {opcode}");
        assert!(!tshark(&capture, &["-Y", &filter]).is_empty(), "no opcode {opcode}");
    }
}

#[test]
fn packets_of_a_simulation_are_well_formed() {
    if !is_installed("tshark") {
        return skip("tshark is not installed");
    }
    let folder = Folder::new();
    let capture = folder.file("sim.pcap");
    let arguments = ["sim", "--loss=10%", "--pcap", &capture];
    Running::start("sim", millstream().args(arguments)).output().success();
    let packets = tshark(&capture, &["-T", "fields", "-e", "frame.protocols"]);
    assert!(packets.len() > 100);
    assert!(packets.iter().all(|protocols| protocols.contains("udp:infiniband")));
    assert_eq!(tshark(&capture, &["-Y", "_ws.malformed"]), [""; 0]);
}
