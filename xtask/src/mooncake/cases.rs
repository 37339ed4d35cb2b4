//! What a pair of engines does.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::peer::{Kind, LENGTH, Peer};

/// What a batch leaves free between two requests, at the target.
const GAP: u64 = 64;

/// How long what nobody acknowledges may take, and a message.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who a case has.
pub(super) struct Ends<'a> {
    pub(super) initiator: &'a mut Peer,
    pub(super) target: &'a mut Peer,
    /// Segments have names that a server knows.
    pub(super) named: bool,
    /// A WRITE that is done has arrived.
    pub(super) acknowledged: bool,
    /// Starts another target in place of one that was killed.
    pub(super) restart: &'a dyn Fn() -> Result<Peer>,
}

pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) run: fn(&mut Ends<'_>) -> Result<()>,
}

/// In this order: the last ends the target.
pub(super) const CASES: [Case; 8] = [
    Case { name: "WRITE and READ, 1 B to 64 KiB", run: short },
    Case { name: "WRITE and READ, 1 MiB to 64 MiB", run: long },
    Case { name: "128 x 4 KiB", run: |ends| both_ways(ends, 4 << 10, 128) },
    Case { name: "128 x 64 KiB", run: |ends| both_ways(ends, 64 << 10, 128) },
    Case { name: "notify", run: notify },
    Case { name: "probe", run: probe },
    Case { name: "wrong address", run: wrong_address },
    Case { name: "killed and restarted", run: killed },
];

fn short(ends: &mut Ends<'_>) -> Result<()> {
    [1, 2, 7, 8, 23, 24, 4095, 4096, 65_535, 65_536]
        .into_iter()
        .try_for_each(|length| both_ways(ends, length, 1))
}

fn long(ends: &mut Ends<'_>) -> Result<()> {
    [65_537, 1 << 20, (1 << 20) + 1, 16 << 20, 64 << 20]
        .into_iter()
        .try_for_each(|length| both_ways(ends, length, 1))
}

/// So many requests, there and back. Each byte is compared, and those between requests too.
fn both_ways(ends: &mut Ends<'_>, length: u64, count: u64) -> Result<()> {
    let (near, far, whole) = (5, 3, length * count);
    let gap = if count > 1 { GAP } else { 0 };
    ends.target.must("clear")?;
    ends.initiator.must(&format!("fill {length} {near} {whole}"))?;
    transfer(ends, "write", near, far, length, count)?;
    let check = format!("check {length} {far} {length} {count} {gap}");
    let begun = Instant::now();
    loop {
        let wrong = ends.target.must(&check)?;
        if wrong == "0" {
            break;
        }
        let may_come = !ends.acknowledged && begun.elapsed() < PATIENCE;
        ensure!(may_come, "{length} B x {count}: {wrong} bytes of a WRITE are wrong");
        thread::sleep(Duration::from_millis(5));
    }
    // Zeros of before: none of them may be anything else.
    let beside = ends.target.must(&format!("check_zero {} {}", far + length, gap.max(1)))?;
    ensure!(beside == "0", "{length} B x {count}: {beside} bytes beside a WRITE were written");
    ends.initiator.must("clear")?;
    transfer(ends, "read", near, far, length, count)?;
    let wrong = ends.initiator.must(&format!("check {length} {near} {whole} 1 0"))?;
    ensure!(wrong == "0", "{length} B x {count}: {wrong} bytes of a READ are wrong");
    Ok(())
}

fn command(ends: &Ends<'_>, opcode: &str, near: u64, far: u64, length: u64, count: u64) -> String {
    let (segment, target) = (&ends.target.segment, ends.target.address);
    format!("transfer {opcode} {segment} {near} {} {length} {count}", target + far)
}

fn transfer(
    ends: &mut Ends<'_>,
    opcode: &str,
    near: u64,
    far: u64,
    length: u64,
    count: u64,
) -> Result<()> {
    let command = command(ends, opcode, near, far, length, count);
    ends.initiator.must(&command).map(|_| ())
}

/// A message comes once the data is there.
fn notify(ends: &mut Ends<'_>) -> Result<()> {
    ends.target.must("notifies")?;
    let command = command(ends, "write", 0, 0, 100, 2);
    ends.initiator.must(&format!("{command} whose what"))?;
    let begun = Instant::now();
    loop {
        match ends.target.must("notifies")?.as_str() {
            "whose=what" => return Ok(()),
            "" if begun.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(5)),
            other => bail!("messages came: {other:?}"),
        }
    }
}

fn probe(ends: &mut Ends<'_>) -> Result<()> {
    let segment = ends.target.segment.clone();
    ends.initiator.must(&format!("probe {segment}"))?;
    // Where nobody is, the original says -102, and of a name that its server does not know -200. So do we.
    let code = if ends.named { "failed -200" } else { "failed -102" };
    let answer = ends.initiator.tell("probe 127.0.0.1:1")?;
    ensure!(answer.starts_with(code), "of nobody: {answer}");
    Ok(())
}

/// Addresses that are not registered: before, behind and across the end, and far away.
fn wrong_address(ends: &mut Ends<'_>) -> Result<()> {
    let base = ends.target.address;
    for (address, length) in
        [(base - 10, 10), (base + LENGTH, 10), (base + LENGTH - 5, 10), (4096, 1)]
    {
        for opcode in ["read", "write"] {
            // Nobody says so of a WRITE in version 1 of the original, which cannot look before.
            let told = ends.acknowledged || opcode == "read" || ends.initiator.kind == Kind::Ours;
            let segment = &ends.target.segment;
            let command = format!("transfer {opcode} {segment} 0 {address} {length} 1");
            let answer = ends.initiator.tell(&command)?;
            ensure!(answer.starts_with("failed -1") || !told, "{command}: {answer}");
        }
    }
    once_it_is_not_left_alone(ends, 1000)
}

/// After a failure the original leaves a peer alone for a second, also one of its own kind. Ours says once that a process was
/// restarted.
fn once_it_is_not_left_alone(ends: &mut Ends<'_>, length: u64) -> Result<()> {
    let begun = Instant::now();
    let mut told = false;
    loop {
        match both_ways(ends, length, 1) {
            Err(_) if ends.initiator.kind == Kind::Original && begun.elapsed() < PATIENCE => {
                thread::sleep(Duration::from_millis(100));
            }
            Err(error) if !told && error.to_string().contains("was restarted") => told = true,
            result => return result,
        }
    }
}

/// Its peers fail soon, and are served by the next one.
fn killed(ends: &mut Ends<'_>) -> Result<()> {
    ends.target.kill()?;
    let begun = Instant::now();
    let command = command(ends, "read", 0, 0, 1000, 1);
    let answer = ends.initiator.tell(&command)?;
    ensure!(answer.starts_with("failed -1"), "a READ of a process that was killed: {answer}");
    ensure!(begun.elapsed() < PATIENCE, "it took {:?} to fail", begun.elapsed());
    *ends.target = (ends.restart)()?;
    once_it_is_not_left_alone(ends, 5000)
}
