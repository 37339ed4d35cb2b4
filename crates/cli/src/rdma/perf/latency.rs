//! One message at a time.

use std::time::{Duration, Instant};

use anyhow::bail;

use super::control::{Control, Message, SIGNS_LATE};
use super::figures::{Latencies, Outcome};
use super::lanes::{Done, Lanes};
use super::test::Plan;

/// Where the answer is a message, requests need no completions, but to make room in the queue.
const MODERATION: u64 = 32;
/// Between looks at what the other side says.
const LOOK: Duration = Duration::from_millis(100);
/// The only lane.
const LANE: usize = 0;

/// Posts one request after the other and measures: READs until they are complete, others until the
/// other side's answer has come.
pub(super) fn request(
    lanes: &mut Lanes,
    plan: &Plan,
    size: u32,
    control: &mut Control,
) -> anyhow::Result<Outcome> {
    let ping_pong = plan.test.is_ping_pong();
    let server_sees = plan.test.server_sees();
    let mut latencies = Latencies::new(if ping_pong { 0.5 } else { 1.0 })?;
    let start = Instant::now();
    let (limit, deadline) = plan.amount.limits(start);
    let mut number = 0;
    let mut last = start;
    while number < limit && deadline.is_none_or(|deadline| last < deadline) {
        let signaled = |number: u64| !ping_pong || number.is_multiple_of(MODERATION);
        lanes.request(LANE, size, number, 1, signaled)?;
        number += 1;
        let mut answered = false;
        while !answered {
            lanes.next_from(control, plan.patience(size), |done| {
                match done {
                    Done::Message { length, .. } => check_length(length, size, plan)?,
                    Done::Requests { .. } if ping_pong => return Ok(()),
                    Done::Requests { .. } => {}
                }
                answered = true;
                Ok(())
            })?;
        }
        let now = Instant::now();
        latencies.record(now - last);
        last = now;
        if !server_sees && control.give_sign(now) {
            // That takes its time, which is no message's.
            last = Instant::now();
        }
        if ping_pong {
            lanes.post_receives()?;
        }
        if plan.verify && plan.test.operation.is_atomic() {
            lanes.check_results(LANE, number..=number)?;
        }
    }
    let seconds = (last - start).as_secs_f64();
    let latency = Some(latencies.summarize());
    Ok(Outcome { iterations: number, seconds, peak_per_s: 0.0, latency })
}

/// Answers each of the client's messages with one, and returns what the client has measured.
pub(super) fn respond(
    lanes: &mut Lanes,
    plan: &Plan,
    size: u32,
    control: &mut Control,
) -> anyhow::Result<Message> {
    let patience = plan.patience(size);
    if !plan.test.server_sees() {
        return control.receive_while_alive(patience.saturating_add(SIGNS_LATE));
    }
    let mut answered = 0;
    let mut news = Instant::now();
    loop {
        let mut messages = 0;
        let came = lanes.next(LOOK, |done| {
            if let Done::Message { length, .. } = done {
                check_length(length, size, plan)?;
                messages += 1;
            }
            Ok(())
        })?;
        if messages > 0 {
            lanes.request(LANE, size, answered, messages, |number| {
                number.is_multiple_of(MODERATION)
            })?;
            answered += messages;
            lanes.post_receives()?;
        }
        if came {
            news = Instant::now();
            continue;
        }
        if let Some(message) = control.poll()? {
            return Ok(message);
        }
        if news.elapsed() > patience {
            return Err(control.nothing_came(patience));
        }
    }
}

/// The length of a WRITE is not told by each device.
fn check_length(length: u32, size: u32, plan: &Plan) -> anyhow::Result<()> {
    let told = plan.test.operation == super::test::Operation::Send;
    if told && length != size {
        bail!("a message of {length} bytes came, not of {size}");
    }
    Ok(())
}
