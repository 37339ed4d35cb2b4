//! Whose code an address of the program is: functions are inlined into others, so what counts is the
//! source file of the innermost that is ours.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, ensure};

use super::samples::Mapping;

/// For each address where samples are, whose it is: `wire`, `roce`, ... or `ICRC`.
pub(super) type Owners = HashMap<u64, String>;

/// Asks `addr2line` for all of them at once.
pub(super) fn owners(
    program: &Path,
    mappings: &[Mapping],
    addresses: impl Iterator<Item = u64>,
) -> Result<Owners> {
    let file = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let segments = segments(&file).context("the program is no ELF file of 64 bits")?;
    let mut asked = HashMap::new();
    for address in addresses {
        // Newer versions of perf print the place in the file, older ones that in memory.
        let place = mappings.iter().find(|mapping| mapping.addresses.contains(&address));
        let offset =
            place.map_or(address, |mapping| address - mapping.addresses.start + mapping.offset);
        if let Some(linked) = linked_address(&segments, offset) {
            asked.entry(linked).or_insert_with(Vec::new).push(address);
        }
    }
    let mut questions = String::new();
    for linked in asked.keys() {
        let _ = writeln!(questions, "{linked:#x}");
    }
    let answers = addr2line(program, questions)?;
    let mut owners = Owners::new();
    for (linked, files) in blocks(&answers) {
        if let (Some(owner), Some(addresses)) = (owner(&files), asked.get(&linked)) {
            owners.extend(addresses.iter().map(|&address| (address, owner.clone())));
        }
    }
    Ok(owners)
}

fn addr2line(program: &Path, questions: String) -> Result<String> {
    let mut command = Command::new("addr2line");
    command.args(["--addresses", "--inlines", "--functions", "--exe"]).arg(program);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.context("cannot start addr2line")?;
    let mut input = child.stdin.take().context("addr2line has no input")?;
    // It answers while it reads.
    let writer = thread::spawn(move || input.write_all(questions.as_bytes()));
    let output = child.wait_with_output().context("addr2line has no output")?;
    let _ = writer.join();
    ensure!(output.status.success(), "addr2line ended with {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Answers: a line with the address, and then for each function, the innermost first, a line with its
/// name and one with its source file. Here only files.
fn blocks(answers: &str) -> Vec<(u64, Vec<&str>)> {
    let mut blocks: Vec<(u64, Vec<&str>)> = Vec::new();
    let mut is_file = false;
    for line in answers.lines() {
        let address = line.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
        if let Some(address) = address {
            blocks.push((address, Vec::new()));
            is_file = false;
        } else if let Some((_, files)) = blocks.last_mut() {
            if is_file {
                files.push(line);
            }
            is_file = !is_file;
        }
    }
    blocks
}

/// The owner of the innermost of these files that is a crate of ours, or computes a CRC.
fn owner(files: &[&str]) -> Option<String> {
    files.iter().find_map(|file| {
        if ["/crc32fast-", "/src/crc32", "/src/icrc"].iter().any(|part| file.contains(part)) {
            return Some("ICRC".to_owned());
        }
        let (before, _) = file.split_once("/src/")?;
        let (_, name) = before.rsplit_once("crates/")?;
        (!name.contains('/')).then(|| name.to_owned())
    })
}

/// A part of an ELF file and where it is linked to.
#[derive(Debug, PartialEq)]
struct Segment {
    offset: u64,
    length: u64,
    address: u64,
}

fn linked_address(segments: &[Segment], offset: u64) -> Option<u64> {
    let holds = |one: &&Segment| (one.offset..one.offset + one.length).contains(&offset);
    segments.iter().find(holds).map(|one| offset - one.offset + one.address)
}

/// The segments of an ELF file of 64 bits that are loaded.
fn segments(file: &[u8]) -> Option<Vec<Segment>> {
    const LOAD: u64 = 1;
    let number = |at: usize, length: usize| {
        let mut bytes = [0; 8];
        bytes[..length].copy_from_slice(file.get(at..at.checked_add(length)?)?);
        Some(u64::from_le_bytes(bytes))
    };
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (number(0x20, 8)?, number(0x36, 2)?, number(0x38, 2)?);
    let mut segments = Vec::new();
    for index in 0..count {
        let at = usize::try_from(table.checked_add(index * size)?).ok()?;
        if number(at, 4)? == LOAD {
            let [offset, address, length] =
                [number(at + 8, 8)?, number(at + 16, 8)?, number(at + 32, 8)?];
            offset.checked_add(length)?;
            segments.push(Segment { offset, length, address });
        }
    }
    Some(segments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_of_ours_owns_it() {
        let std = "/rustc/1/library/core/src/slice/mod.rs:9";
        for (files, expected) in [
            (
                &[std, "/x/crates/wire/src/packet.rs:3", "/x/crates/roce/src/a.rs:1"][..],
                Some("wire"),
            ),
            (&["/home/me/.cargo/registry/src/i/crc32fast-1.5.4/src/a.rs:1"], Some("ICRC")),
            (&[std, "/x/crates/wire/src/crc32/mod.rs:5"], Some("ICRC")),
            (&["/x/crates/wire/src/icrc.rs:5"], Some("ICRC")),
            (&["crates/net/src/udp/send.rs:5"], Some("net")),
            (&[std, "??:?"], None),
            (&[], None),
        ] {
            assert_eq!(owner(files).as_deref(), expected, "{files:?}");
        }
    }

    #[test]
    fn answers_of_addr2line_are_read() {
        let answers =
            "0x0000000000001000\ninner\n/a.rs:1\n0xouter\n/b.rs:2\n0x0000000000002000\n??\n??:0\n";
        let expected = [(0x1000, vec!["/a.rs:1", "/b.rs:2"]), (0x2000, vec!["??:0"])];
        assert_eq!(blocks(answers), expected);
    }

    #[test]
    fn this_program_has_segments() {
        let file = fs::read(std::env::current_exe().unwrap()).unwrap();
        let segments = segments(&file).unwrap();
        assert_eq!(linked_address(&segments, 0), Some(segments[0].address));
        assert_eq!(linked_address(&segments, u64::MAX), None);
        assert_eq!(super::segments(b"#!/bin/sh"), None);
        assert_eq!(super::segments(&file[..64]), None);
    }
}
