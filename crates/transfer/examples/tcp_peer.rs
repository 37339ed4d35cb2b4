//! A process with a transfer engine over TCP, which does what lines of its input say, as
//! `xtask/src/mooncake/peer.py` does with the original's.
//!
//! `tcp_peer LENGTH STORE`: so many bytes of memory. Settings are those of the environment; `CONFIRM_WRITES` has WRITEs
//! of version 1 confirmed. Each line is answered by
//! one: `ok`, `ok` and a value, or `failed` and the code and text of an error.

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::net::IpAddr;
use std::time::Duration;

use millstream_transfer::{
    Buffer, Notification, Opcode, Settings, Sources, SubmitOptions, TcpConfig, TransferEngine,
    TransferRequest, TransferState,
};

/// Longer than anything takes, unless it hangs.
const LONG: Duration = Duration::from_secs(60);

/// What a batch of several requests leaves free between two of them, at the target.
const GAP: u64 = 64;

/// An error, with its code if it has one.
type Failed = Box<dyn Error>;

fn main() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, length, store] = &arguments[..] else { return Err("tcp_peer LENGTH STORE".into()) };
    if store != "P2PHANDSHAKE" {
        return Err(format!("there is no store {store} yet").into());
    }
    let settings = Settings::load(&Sources::of_process())?;
    let host: IpAddr = std::env::var("MC_TCP_BIND_ADDRESS")?.parse()?;
    let engine = TransferEngine::new(settings.engine(host))?;
    let confirm_writes = std::env::var_os("CONFIRM_WRITES").is_some();
    let tcp = settings.tcp();
    engine
        .install_tcp(TcpConfig { confirm_writes: confirm_writes || tcp.confirm_writes, ..tcp })?;
    let memory = engine.allocate_buffer(length.parse()?, "*", true)?;
    println!("ready {} {}", engine.name(), memory.address());
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let reply = obey(&engine, &memory, &words)
            .map_or_else(|error| format!("failed {error}"), |value| format!("ok {value}"));
        println!("{}", reply.trim_end());
        io::stdout().flush()?;
    }
    Ok(())
}

fn obey(engine: &TransferEngine, memory: &Buffer, words: &[&str]) -> Result<String, Failed> {
    let numbers: Vec<u64> = words.iter().filter_map(|word| word.parse().ok()).collect();
    match (words, &numbers[..]) {
        (["transfer", opcode, segment, ..], &[near, far, length, count, ..]) => {
            let opcode = if *opcode == "write" { Opcode::Write } else { Opcode::Read };
            let segment =
                engine.open_segment(segment).map_err(|error| coded(error.code(), &error))?;
            let request = |index| TransferRequest {
                opcode,
                source: memory.address() + near + index * length,
                target: segment.id(),
                target_offset: far + index * (length + GAP),
                length,
            };
            let requests: Vec<_> = (0..count).map(request).collect();
            let mut options = SubmitOptions::default();
            if let [.., name, text] = words[7..] {
                options.notify = Some(Notification { name: name.into(), text: text.into() });
            }
            transfer(engine, &requests, &options)
        }
        (["fill", ..], &[seed, offset, length]) => {
            let bytes: Vec<u8> = (0..length).map(|index| pattern(seed, index)).collect();
            memory.write(offset as usize, &bytes)?;
            Ok(String::new())
        }
        (["clear"], _) => {
            memory.write(0, &vec![0; memory.length()])?;
            Ok(String::new())
        }
        (["check", ..], &[seed, offset, length, count, gap]) => {
            let mut bytes = vec![0; length as usize];
            let mut wrong = 0;
            for index in 0..count {
                memory.read((offset + index * (length + gap)) as usize, &mut bytes)?;
                let expected = (0..length).map(|byte| pattern(seed, index * length + byte));
                wrong += bytes.iter().zip(expected).filter(|(a, b)| *a != b).count();
            }
            Ok(wrong.to_string())
        }
        (["check_zero", ..], &[offset, length]) => {
            let mut bytes = vec![0; length as usize];
            memory.read(offset as usize, &mut bytes)?;
            Ok(bytes.iter().filter(|byte| **byte != 0).count().to_string())
        }
        (["probe", segment], _) => {
            engine.probe(segment).map_err(|error| coded(error.code(), &error))?;
            Ok(String::new())
        }
        (["notifies"], _) => {
            let notes = engine.take_notifications();
            let text = |note: Notification| format!("{}={}", note.name, note.text);
            Ok(notes.into_iter().map(text).collect::<Vec<_>>().join(" "))
        }
        _ => Err(format!("no command {words:?}").into()),
    }
}

fn transfer(
    engine: &TransferEngine,
    requests: &[TransferRequest],
    options: &SubmitOptions,
) -> Result<String, Failed> {
    let batch = engine.allocate_batch(requests.len())?;
    let submitted = engine.submit_with(&batch, requests, options);
    submitted.map_err(|error| coded(error.code(), &error))?;
    if !engine.wait(&batch, LONG) {
        return Err("it hangs".into());
    }
    let mut unconfirmed = false;
    for status in engine.statuses(&batch) {
        if status.state != TransferState::Completed {
            let why = status.error.map_or_else(String::new, |error| error.to_string());
            return Err(format!("-1 {:?} {why}", status.state).into());
        }
        unconfirmed |= status.unconfirmed;
    }
    Ok(if unconfirmed { "unconfirmed" } else { "" }.to_owned())
}

fn coded(code: i32, error: &dyn Error) -> Failed {
    format!("{code} {error}").into()
}

/// A byte that depends on the seed and its place.
const fn pattern(seed: u64, index: u64) -> u8 {
    ((index.wrapping_add(seed << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}
