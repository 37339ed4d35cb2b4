//! Writes to a segment that is a file until it is gone, with a journal of what was COMPLETED; and says whether
//! all of that is there.
//!
//! `file_writes write|write-durable|check ADDRESS SEGMENT JOURNAL`: `ADDRESS` is an IP address of this
//! machine. The file is taken as slots of 16 KiB, of which every second one is written in whole, and the
//! others unaligned. Each WRITE is another version of a slot. The journal has a line when it begins, and
//! one when it is COMPLETED. Further runs add to it. `check` prints how many slots were written and how
//! many do not hold what they must: the last version that was COMPLETED, or one that was begun later.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use millstream_transfer::{
    Buffer, Config, NvmeofConfig, Opcode, Segment, SubmitOptions, TransferEngine, TransferRequest,
    TransferState,
};

type Anything = Box<dyn Error + Send + Sync>;

const SLOT: u64 = 16 << 10;

/// Threads, each with slots of its own: so many WRITEs are under way.
const WRITERS: u64 = 4;

/// A target that says nothing for so long is gone.
const SILENCE: Duration = Duration::from_millis(500);

const LONG: Duration = Duration::from_secs(60);

/// Where in the file the bytes of a slot are.
fn place(slot: u64) -> (u64, u64) {
    match slot % 2 {
        0 => (slot * SLOT, SLOT),
        _ => (slot * SLOT + 7, 9001),
    }
}

/// The bytes of a version of a slot; of version 0, which was there before, zeros.
fn version_bytes(slot: u64, version: u64) -> Vec<u8> {
    let mut state = (slot << 32 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..SLOT / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if version == 0 { [0; 8] } else { state.to_le_bytes() }
    });
    words.take(place(slot).1 as usize).collect()
}

/// What is known of a slot.
#[derive(Default)]
struct History {
    completed: u64,
    /// The newest that was begun.
    begun: u64,
}

/// What a journal says. Its last line may be half of one.
fn histories(journal: &str) -> HashMap<u64, History> {
    let mut histories: HashMap<u64, History> = HashMap::new();
    for line in journal.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let words: Vec<_> = line.split_whitespace().collect();
        let [what, slot, version] = words[..] else { continue };
        let (Ok(slot), Ok(version)) = (slot.parse(), version.parse()) else { continue };
        let history = histories.entry(slot).or_default();
        match what {
            "begin" => history.begun = version,
            _ => history.completed = version,
        }
    }
    histories
}

fn main() -> Result<(), Anything> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, address, name, path] = &arguments[..] else {
        return Err("usage: file_writes write|write-durable|check ADDRESS SEGMENT JOURNAL".into());
    };
    let engine = TransferEngine::new(Config::new(address.parse::<IpAddr>()?))?;
    engine.install_nvmeof(NvmeofConfig { silence: SILENCE, ..NvmeofConfig::default() })?;
    let segment = engine.open_segment(name)?;
    let length: u64 = segment.buffers().iter().map(|buffer| buffer.length).sum();
    let slots = length / SLOT;
    let histories = histories(&fs::read_to_string(path).unwrap_or_default());
    if what == "check" {
        return check(&engine, &segment, slots, &histories);
    }
    let options = SubmitOptions { durable: what == "write-durable", ..SubmitOptions::default() };
    let journal = OpenOptions::new().append(true).create(true).open(path)?;
    thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (engine, segment, options) = (&engine, &segment, &options);
                let (histories, journal) = (&histories, &journal);
                scope.spawn(move || {
                    let buffer = engine.allocate_buffer(SLOT as usize, "*", false)?;
                    let own: Vec<u64> = (writer..slots).step_by(WRITERS as usize).collect();
                    write((engine, options), segment, &buffer, &own, histories, journal)
                })
            })
            .collect();
        for writer in writers {
            let ended = writer.join().map_err(|_| "a thread has panicked")?;
            eprintln!("{:?}", ended.map_err(|error: Anything| error.to_string()));
        }
        Ok(())
    })
}

fn request(
    opcode: Opcode,
    buffer: &Buffer,
    segment: &Segment,
    (target_offset, length): (u64, u64),
) -> TransferRequest {
    TransferRequest {
        opcode,
        source: buffer.address(),
        target: segment.id(),
        target_offset,
        length,
    }
}

/// Writes version after version to these slots, until that fails.
fn write(
    (engine, options): (&TransferEngine, &SubmitOptions),
    segment: &Segment,
    buffer: &Buffer,
    slots: &[u64],
    histories: &HashMap<u64, History>,
    mut journal: &File,
) -> Result<(), Anything> {
    let mut round = 0;
    loop {
        round += 1;
        // Some of them often, as their neighbours in the cache differ in age.
        for &slot in slots.iter().filter(|&&slot| slot % 8 < 4 || round % 3 == 0) {
            let before = histories.get(&slot).map_or(0, |history| history.begun);
            let version = before + round;
            buffer.write(0, &version_bytes(slot, version))?;
            let write = request(Opcode::Write, buffer, segment, place(slot));
            // In one call each: other threads write there too.
            journal.write_all(format!("begin {slot} {version}\n").as_bytes())?;
            let batch = engine.submit_new(&[write], options)?;
            if !engine.wait(&batch, LONG) {
                return Err("a WRITE does not end".into());
            }
            let status = engine.status(&batch, 0)?;
            engine.free(batch)?;
            if status.state != TransferState::Completed {
                return Err(format!("{status:?}").into());
            }
            journal.write_all(format!("completed {slot} {version}\n").as_bytes())?;
        }
    }
}

/// Reads all of them, and compares byte by byte.
fn check(
    engine: &TransferEngine,
    segment: &Segment,
    slots: u64,
    histories: &HashMap<u64, History>,
) -> Result<(), Anything> {
    let none = History::default();
    let buffer = engine.allocate_buffer(SLOT as usize, "*", false)?;
    let (mut completed, mut lost) = (0, 0);
    for slot in 0..slots {
        let history = histories.get(&slot).unwrap_or(&none);
        let place = place(slot);
        let read = request(Opcode::Read, &buffer, segment, place);
        engine.submit_and_wait(&[read], LONG)?;
        let mut bytes = vec![0; place.1 as usize];
        buffer.read(0, &mut bytes)?;
        let allowed: Vec<_> = (history.completed..=history.begun.max(history.completed))
            .map(|version| version_bytes(slot, version))
            .collect();
        let wrong = bytes
            .iter()
            .enumerate()
            .filter(|(index, byte)| allowed.iter().all(|version| version[*index] != **byte));
        let wrong = wrong.count();
        completed += u64::from(history.completed > 0);
        lost += u64::from(wrong > 0);
        if wrong > 0 {
            eprintln!(
                "slot {slot}: {wrong} bytes are neither of version {}, which was COMPLETED, nor of one up to {}",
                history.completed, history.begun
            );
        }
    }
    println!("{{\"completed\":{completed},\"lost\":{lost}}}");
    Ok(())
}
