//! A process with a transfer engine over TCP, which does what lines of its input say, as
//! `xtask/src/mooncake/peer.py` does with the original's.
//!
//! `tcp_peer LENGTH STORE NAME`: so many bytes of memory, and what the segment is called where the store has names. Settings are those of the environment; `CONFIRM_WRITES` has WRITEs
//! of version 1 confirmed. Each line is answered by
//! one: `ok`, `ok` and a value, or `failed` and the code and text of an error.

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::net::IpAddr;
use std::time::Duration;

use millstream_metadata::is_peer_to_peer;
use millstream_transfer::{
    Buffer, Config, Notification, Opcode, Settings, Sources, SubmitOptions, TcpConfig,
    TransferEngine, TransferRequest, TransferState,
};

/// Longer than anything takes, unless it hangs.
const LONG: Duration = Duration::from_secs(60);

/// What a batch of several requests leaves free between two of them, at the target.
const GAP: u64 = 64;

/// An error, with its code if it has one.
type Failed = Box<dyn Error>;

fn main() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, length, store, name] = &arguments[..] else {
        return Err("tcp_peer LENGTH STORE NAME".into());
    };
    let settings = Settings::load(&Sources::of_process())?;
    let host: IpAddr = std::env::var("MC_TCP_BIND_ADDRESS")?.parse()?;
    let segment_name = (!is_peer_to_peer(store)).then(|| name.clone());
    let config = Config { metadata: store.clone(), segment_name, ..settings.engine(host) };
    let engine = TransferEngine::new(config)?;
    let confirm_writes = std::env::var_os("CONFIRM_WRITES").is_some();
    let tcp = settings.tcp();
    engine
        .install_tcp(TcpConfig { confirm_writes: confirm_writes || tcp.confirm_writes, ..tcp })?;
    let memory = engine.allocate_buffer(length.parse()?, "*", true)?;
    let pattern = Pattern::new();
    println!("ready {} {}", engine.name(), memory.address());
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let reply = obey(&engine, &memory, &pattern, &words)
            .map_or_else(|error| format!("failed {error}"), |value| format!("ok {value}"));
        println!("{}", reply.trim_end());
        io::stdout().flush()?;
    }
    Ok(())
}

fn obey(
    engine: &TransferEngine,
    memory: &Buffer,
    pattern: &Pattern,
    words: &[&str],
) -> Result<String, Failed> {
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
            memory.write(offset as usize, &pattern.bytes(seed, length))?;
            Ok(String::new())
        }
        (["clear"], _) => {
            memory.write(0, &vec![0; memory.length()])?;
            Ok(String::new())
        }
        (["check", ..], &[seed, offset, length, count, gap]) => {
            let mut bytes = vec![0; length as usize];
            let mut wrong = 0;
            let expected = pattern.bytes(seed, length * count);
            for (index, expected) in (0..).zip(expected.chunks_exact(length as usize)) {
                memory.read((offset + index * (length + gap)) as usize, &mut bytes)?;
                wrong += bytes.iter().zip(expected).filter(|(a, b)| a != b).count();
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

/// Bytes that depend on a seed and their place.
struct Pattern(Vec<u8>);

impl Pattern {
    /// A prime number, so that bytes do not repeat where anything is aligned.
    const PERIOD: u64 = 1_000_003;

    fn new() -> Self {
        let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        Self((0..Self::PERIOD).map(byte).collect())
    }

    fn bytes(&self, seed: u64, length: u64) -> Vec<u8> {
        let from = (seed % Self::PERIOD) as usize;
        self.0.iter().cycle().skip(from).take(length as usize).copied().collect()
    }
}
