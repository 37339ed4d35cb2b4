//! As many messages at a time as the queues hold.

use std::time::{Duration, Instant};

use anyhow::bail;

use super::control::{Control, Message, SIGNS_LATE};
use super::figures::{Outcome, Timeline};
use super::lanes::{Done, Lanes};
use super::test::Plan;

/// Above this size each request completes by itself, as in perftest.
const MODERATED_MAX: u32 = 8192;
/// At most so many requests share a completion, as in perftest.
const MODERATION_MAX: u64 = 100;
/// Between looks at what the other side says.
const LOOK: Duration = Duration::from_millis(100);

/// A lane of the side that posts requests.
#[derive(Clone, Copy, Default)]
struct Progress {
    posted: u64,
    completed: u64,
    /// The last request that will complete.
    signaled: u64,
    /// Requests whose results were checked.
    checked: u64,
}

/// Of how many requests one completes. Never so few that the queue runs empty meanwhile.
pub(super) fn moderation(plan: &Plan, size: u32) -> u64 {
    if size > MODERATED_MAX { 1 } else { (plan.send_depth as u64 / 4).clamp(1, MODERATION_MAX) }
}

/// Posts the requests and measures.
pub(super) fn request(
    lanes: &mut Lanes,
    plan: &Plan,
    size: u32,
    control: &mut Control,
) -> anyhow::Result<Outcome> {
    let moderation = moderation(plan, size);
    let depth = plan.send_depth as u64;
    let server_sees = plan.test.server_sees();
    let start = Instant::now();
    let (limit, deadline) = plan.amount.limits(start);
    let mut progress = vec![Progress::default(); lanes.count()];
    let mut timeline = Timeline::new(start);
    let (mut posted, mut completed) = (0, 0);
    let mut last = start;
    loop {
        let over = deadline.is_some_and(|deadline| last >= deadline);
        let mut busy = false;
        for (index, lane) in progress.iter_mut().enumerate() {
            let room = depth - (lane.posted - lane.completed);
            let count = match over {
                false => room.min(limit - lane.posted),
                // One more, so that all before it are known to be complete.
                true if lane.signaled < lane.posted => room.min(1),
                true => 0,
            };
            if count > 0 {
                timeline.posting(last, posted);
                let end = lane.posted + count;
                let final_one = if over { end } else { limit };
                let signaled =
                    |number: u64| number.is_multiple_of(moderation) || number == final_one;
                lanes.request(index, size, lane.posted, count, signaled)?;
                let newest = (lane.posted + 1..=end).rev().find(|&number| signaled(number));
                lane.signaled = newest.unwrap_or(lane.signaled);
                (lane.posted, posted) = (end, posted + count);
            }
            busy |= lane.completed < lane.posted;
        }
        if !busy {
            break;
        }
        lanes.next_from(control, plan.patience(size), |done| {
            let Done::Requests { lane, number } = done else {
                bail!("a message came, and no receive was posted");
            };
            let Some(lane) = progress.get_mut(lane) else { bail!("a completion of no request") };
            // A completion stands for those before it, too.
            completed += number.saturating_sub(lane.completed);
            lane.completed = number;
            Ok(())
        })?;
        if plan.verify && plan.test.operation.is_atomic() {
            for (index, lane) in progress.iter_mut().enumerate() {
                lanes.check_results(index, lane.checked + 1..=lane.completed)?;
                lane.checked = lane.completed;
            }
        }
        last = Instant::now();
        timeline.completed(last, completed);
        if !server_sees {
            control.give_sign(last);
        }
    }
    let seconds = (last - start).as_secs_f64();
    let peak_per_s = timeline.peak_per_s();
    Ok(Outcome { iterations: completed, seconds, peak_per_s, latency: None })
}

/// Lets the client's requests happen, and returns what it has measured.
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
    let mut received = 0;
    let mut news = Instant::now();
    let mut measured: Option<Message> = None;
    loop {
        if let Some(Message::Measured { outcome, .. }) = &measured {
            if received == outcome.iterations {
                break;
            }
            if received > outcome.iterations {
                bail!("{received} messages came, and the client says {}", outcome.iterations);
            }
        }
        let came = lanes.next(LOOK, |done| match done {
            Done::Message { length, .. } if length == size => {
                received += 1;
                Ok(())
            }
            Done::Message { length, .. } => {
                bail!("a message of {length} bytes came, not of {size}")
            }
            Done::Requests { .. } => bail!("a completion of no request"),
        })?;
        if came {
            news = Instant::now();
            lanes.post_receives()?;
            continue;
        }
        let is_late = news.elapsed() > patience;
        match &measured {
            Some(Message::Measured { outcome, .. }) if is_late => {
                bail!("{received} messages of {} came", outcome.iterations)
            }
            Some(_) => {}
            None => match control.poll()? {
                Some(message @ Message::Measured { .. }) => measured = Some(message),
                // Whatever it is, it is not what the client has measured.
                Some(message) => return Ok(message),
                None if is_late => return Err(control.nothing_came(patience)),
                None => {}
            },
        }
    }
    measured.map_or_else(|| control.receive(), Ok)
}
