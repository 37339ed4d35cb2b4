//! Patience: since when nothing has moved, whom that is to be told, and when to give up.

use std::time::{Duration, Instant};

use anyhow::bail;

use crate::bench::figures::per;
use crate::{output, units};

/// After how long without a byte that is told, and how often it is told at most.
const SILENCE: Duration = Duration::from_secs(5);
const TELL_INTERVAL: Duration = Duration::from_secs(10);

/// How often it is looked whether something has moved.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Over how long it is judged whether many packets are lost, and from how many bytes for each loss
/// on they are not many.
const PACE_WINDOW: Duration = Duration::from_secs(5);
const BYTES_FOR_A_LOSS: u64 = 1 << 20;

/// Watches over one command.
pub(super) struct Watch {
    command: &'static str,
    /// How long nothing may move; `None` is for ever.
    limit: Option<Duration>,
    /// How many bytes there are to copy, if that is known, and how many were.
    total: Option<u64>,
    pub(super) done: u64,
    /// The same with those of chunks that are under way, as of when it was last looked.
    moved: u64,
    told_at: Option<Instant>,
    window: Option<Window>,
}

/// Where losses are counted from.
struct Window {
    start: Instant,
    moved: u64,
    losses: u64,
}

/// Something that is waited for.
pub(super) struct Wait<'a> {
    watch: &'a mut Watch,
    /// As in "waiting for ...".
    what: &'a str,
    /// Time beyond the limit, for who knows more than that nothing moves.
    slack: Duration,
    /// Whatever changes when bytes move.
    moved: u64,
    moved_at: Instant,
}

/// What is to be done about something that is waited for.
#[derive(Debug, Eq, PartialEq)]
enum Verdict {
    Wait,
    Tell(String),
    GiveUp(String),
}

impl Watch {
    pub(super) fn new(command: &'static str, limit: Option<Duration>) -> Self {
        Self { command, limit, total: None, done: 0, moved: 0, told_at: None, window: None }
    }

    /// The copy starts again, of so many bytes.
    pub(super) fn restart(&mut self, total: Option<u64>) {
        (self.total, self.done, self.moved) = (total, 0, 0);
    }

    /// Something is waited for from now on.
    pub(super) fn wait_for<'a>(&'a mut self, what: &'a str) -> Wait<'a> {
        let moved_at = Instant::now();
        Wait { watch: self, what, slack: Duration::ZERO, moved: 0, moved_at }
    }

    /// Tells that many packets are lost, when so many bytes have moved and so many losses were
    /// repaired in all by now.
    pub(super) fn pace(&mut self, moved: u64, losses: u64) {
        self.moved = moved;
        if let Some(line) = self.judge_pace(Instant::now(), moved, losses) {
            output::complain(&line);
        }
    }

    /// How far it is: `12 MiB of 1 GiB done`.
    fn progress(&self) -> String {
        let done = units::readable(self.done.max(self.moved));
        match self.total {
            Some(total) => format!("{done} of {} done", units::readable(total)),
            None => format!("{done} done"),
        }
    }

    /// How far it is, to the byte: `12 of 1000 bytes`.
    pub(super) fn how_far(&self) -> String {
        match self.total {
            Some(total) => format!("{} of {}", self.done, units::bytes(total)),
            None => units::bytes(self.done),
        }
    }

    fn may_tell(&mut self, now: Instant) -> bool {
        let due = self.told_at.is_none_or(|told| now.duration_since(told) >= TELL_INTERVAL);
        if due {
            self.told_at = Some(now);
        }
        due
    }

    fn judge_pace(&mut self, now: Instant, moved: u64, losses: u64) -> Option<String> {
        let window = self.window.get_or_insert(Window { start: now, moved, losses });
        let elapsed = now.duration_since(window.start);
        if elapsed < PACE_WINDOW {
            return None;
        }
        // Another engine counts from 0 again.
        let bytes = moved.saturating_sub(window.moved);
        let repaired = losses.saturating_sub(window.losses);
        *window = Window { start: now, moved, losses };
        if repaired == 0 || bytes / repaired >= BYTES_FOR_A_LOSS || !self.may_tell(now) {
            return None;
        }
        let rate = units::rate(per(bytes as f64, elapsed.as_secs_f64()));
        Some(format!(
            "{}: slow: {rate}, as packets are lost: {repaired} times in {:.0} s they were sent \
             again ({})",
            self.command,
            elapsed.as_secs_f64(),
            self.progress(),
        ))
    }
}

impl Wait<'_> {
    /// Gives up only so much later.
    pub(super) fn with_slack(mut self, slack: Duration) -> Self {
        self.slack = slack;
        self
    }

    /// How long to wait before looking.
    pub(super) fn pause(&self) -> Duration {
        let Some(limit) = self.watch.limit else { return LOOK_INTERVAL };
        let left = limit.saturating_add(self.slack).saturating_sub(self.moved_at.elapsed());
        left.clamp(Duration::from_millis(1), LOOK_INTERVAL)
    }

    /// Looks whether something has moved, by a value that changes then. An error when that was too
    /// long ago.
    pub(super) fn look(&mut self, moved: u64) -> anyhow::Result<()> {
        match self.judge(Instant::now(), moved) {
            Verdict::Wait => {}
            Verdict::Tell(line) => output::complain(&line),
            Verdict::GiveUp(why) => bail!("{why}"),
        }
        Ok(())
    }

    /// The same, of what is never given up.
    pub(super) fn look_only(&mut self, moved: u64) {
        let limit = self.watch.limit.take();
        // Without a limit there is no error.
        let _ = self.look(moved);
        self.watch.limit = limit;
    }

    pub(super) fn watch(&mut self) -> &mut Watch {
        self.watch
    }

    fn judge(&mut self, now: Instant, moved: u64) -> Verdict {
        if moved != self.moved {
            self.moved = moved;
            self.moved_at = now;
            return Verdict::Wait;
        }
        let silent = now.duration_since(self.moved_at);
        let what = self.what;
        let left = self.watch.limit.map(|limit| limit.saturating_sub(silent).as_secs_f64());
        if let Some(limit) = self.watch.limit
            && silent >= limit.saturating_add(self.slack)
        {
            return Verdict::GiveUp(format!(
                "nothing has moved for {limit:?}, waiting for {what} (--timeout says for how long)"
            ));
        }
        if silent < SILENCE || !self.watch.may_tell(now) {
            return Verdict::Wait;
        }
        let (silent, progress) = (silent.as_secs_f64(), self.watch.progress());
        let end = left.map_or_else(String::new, |left| format!("; giving up in {left:.0} s"));
        Verdict::Tell(format!(
            "{}: nothing has moved for {silent:.0} s ({progress}), waiting for {what}{end}",
            self.watch.command
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn silence_is_told_every_ten_seconds_and_comes_to_an_end() {
        let mut watch = Watch::new("put", Some(seconds(30)));
        (watch.total, watch.done) = (Some(1 << 30), 12 << 20);
        let mut wait = watch.wait_for("segment a:1");
        let start = wait.moved_at;
        let mut told = Vec::new();
        for second in 1..=29 {
            if let Verdict::Tell(line) = wait.judge(start + seconds(second), 0) {
                told.push((second, line));
            }
        }
        assert_eq!(
            told[0].1,
            "put: nothing has moved for 5 s (12 MiB of 1 GiB done), waiting for segment a:1; \
             giving up in 25 s"
        );
        assert_eq!(told.iter().map(|(second, _)| *second).collect::<Vec<_>>(), [5, 15, 25]);
        let Verdict::GiveUp(why) = wait.judge(start + seconds(30), 0) else { panic!() };
        assert!(why.contains("30s") && why.contains("segment a:1"), "{why}");
    }

    #[test]
    fn a_byte_every_now_and_then_is_enough() {
        let mut watch = Watch::new("get", Some(seconds(3)));
        let mut wait = watch.wait_for("x");
        let start = wait.moved_at;
        for second in 1..100 {
            assert_eq!(wait.judge(start + seconds(2 * second), second), Verdict::Wait);
        }
    }

    #[test]
    fn the_longest_limit_is_one() {
        let mut watch = Watch::new("get", Some(Duration::MAX));
        let mut wait = watch.wait_for("x").with_slack(seconds(1));
        assert_eq!(wait.pause(), LOOK_INTERVAL);
        let now = wait.moved_at;
        assert_eq!(wait.judge(now, 0), Verdict::Wait);
    }

    #[test]
    fn without_a_limit_it_is_told_for_ever() {
        let mut watch = Watch::new("get", None);
        let mut wait = watch.wait_for("x");
        let start = wait.moved_at;
        let Verdict::Tell(line) = wait.judge(start + seconds(100_000), 0) else { panic!() };
        assert_eq!(line, "get: nothing has moved for 100000 s (0 B done), waiting for x");
    }

    #[test]
    fn who_knows_more_is_given_the_time_to_say_it() {
        let mut watch = Watch::new("get", Some(seconds(1)));
        let mut wait = watch.wait_for("x").with_slack(seconds(1));
        let start = wait.moved_at;
        assert_eq!(wait.judge(start + seconds(1), 0), Verdict::Wait);
        assert!(matches!(wait.judge(start + seconds(2), 0), Verdict::GiveUp(_)));
    }

    #[test]
    fn losses_are_told_when_they_are_many() {
        let start = Instant::now();
        let mut watch = Watch::new("put", None);
        assert_eq!(watch.judge_pace(start, 0, 0), None);
        assert_eq!(watch.judge_pace(start + seconds(4), 1 << 20, 500), None, "too early");
        let line = watch.judge_pace(start + seconds(5), 5 << 20, 500).unwrap();
        assert_eq!(
            line,
            "put: slow: 1.05 MB/s, as packets are lost: 500 times in 5 s they were sent again \
             (0 B done)"
        );
        assert_eq!(watch.judge_pace(start + seconds(10), 6 << 20, 900), None, "told just now");
        assert!(watch.judge_pace(start + seconds(15), 7 << 20, 950).is_some());
        // A few losses are no news, and neither is a slow path without any.
        assert_eq!(watch.judge_pace(start + seconds(30), 1 << 40, 960), None);
        assert_eq!(watch.judge_pace(start + seconds(45), 1 << 40, 960), None);
    }
}
