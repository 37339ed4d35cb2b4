//! How often the same line may be logged: a peer that does something again and again must not fill
//! a disk, nor hide what else is logged.
//!
//! Each place in the code that logs may do so a few times within a window of time. What more it has
//! to say is counted, and told in one line when the window is over. Who asks for details, debug or
//! trace, gets all of them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// How often within a window.
const MOST: u64 = 10;
const WINDOW: Duration = Duration::from_secs(10);

static COUNTS: Mutex<Option<Counts>> = Mutex::new(None);

fn counts() -> MutexGuard<'static, Option<Counts>> {
    COUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The part of the subscriber that leaves events out.
pub(super) struct Limit(());

impl Limit {
    pub(super) fn start() -> Self {
        *counts() = Some(Counts::default());
        Self(())
    }
}

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        // What `summarize` says comes through here too, and its window is new.
        let mut counts = counts();
        let Some(counts) = counts.as_mut() else { return true };
        let admitted = counts.admit(event.metadata(), Instant::now());
        if !admitted && !std::mem::replace(&mut counts.awaited, true) {
            let thread = thread::Builder::new().name("log-summaries".to_owned());
            // Without the thread, they are told when the process ends.
            let _ = thread.spawn(tell_in_time);
        }
        admitted
    }
}

/// Tells what was left out in windows that are not over yet.
pub(super) fn finish() {
    let left_out = counts().take().map(|mut counts| counts.left_out(None));
    left_out.into_iter().flatten().for_each(summarize);
}

/// Tells what was left out at the end of each window, until there is nothing to tell.
fn tell_in_time() {
    loop {
        let mut locked = counts();
        let Some(counts) = locked.as_mut() else { return };
        let Some(end) = counts.next_end() else {
            counts.awaited = false;
            return;
        };
        let now = Instant::now();
        let left_out = counts.left_out(Some(now));
        drop(locked);
        left_out.into_iter().for_each(summarize);
        thread::sleep(end.saturating_duration_since(now));
    }
}

/// Says how much was left out, as what was left out would have been said.
fn summarize(LeftOut { metadata, count }: LeftOut) {
    let fields = metadata.fields();
    let Some(message) = fields.field("message") else { return };
    let text = format_args!("{count} more like this in the last {} s", WINDOW.as_secs());
    let text: &dyn tracing::Value = &text;
    Event::dispatch(metadata, &fields.value_set(&[(&message, Some(text))]));
}

/// What each place in the code has logged.
#[derive(Default)]
struct Counts {
    windows: HashMap<Identifier, Window>,
    /// A thread waits for windows to end.
    awaited: bool,
}

struct Window {
    metadata: &'static Metadata<'static>,
    start: Instant,
    events: u64,
}

/// Events of one place that were not logged.
struct LeftOut {
    metadata: &'static Metadata<'static>,
    count: u64,
}

impl Counts {
    /// Whether an event may be logged now.
    fn admit(&mut self, metadata: &'static Metadata<'static>, now: Instant) -> bool {
        let new = Window { metadata, start: now, events: 0 };
        let window = self.windows.entry(metadata.callsite()).or_insert(new);
        // One in which events were left out ends when that is told.
        if window.is_over(now) && window.left_out() == 0 {
            (window.start, window.events) = (now, 0);
        }
        window.events += 1;
        window.events <= MOST
    }

    /// When the next window ends in which something was left out.
    fn next_end(&self) -> Option<Instant> {
        let waiting = self.windows.values().filter(|window| window.left_out() > 0);
        waiting.map(|window| window.start + WINDOW).min()
    }

    /// Takes what was left out in windows that are over by now, or in all.
    fn left_out(&mut self, now: Option<Instant>) -> Vec<LeftOut> {
        let mut left_out = Vec::new();
        self.windows.retain(|_, window| {
            let over = now.is_none_or(|now| window.is_over(now));
            let (metadata, count) = (window.metadata, window.left_out());
            if over && count > 0 {
                left_out.push(LeftOut { metadata, count });
            }
            !over
        });
        left_out
    }
}

impl Window {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.start) >= WINDOW
    }

    fn left_out(&self) -> u64 {
        self.events.saturating_sub(MOST)
    }
}

#[cfg(test)]
mod tests {
    use tracing::callsite::Callsite;
    use tracing::field::FieldSet;
    use tracing::metadata::Kind;
    use tracing::subscriber::Interest;

    use super::*;

    /// A place in the code that logs.
    struct Place;

    static PLACE: Place = Place;
    static METADATA: Metadata<'static> = Metadata::new(
        "place",
        "test",
        Level::WARN,
        None,
        None,
        None,
        FieldSet::new(&["message"], Identifier(&PLACE)),
        Kind::EVENT,
    );

    impl Callsite for Place {
        fn set_interest(&self, _: Interest) {}

        fn metadata(&self) -> &Metadata<'_> {
            &METADATA
        }
    }

    #[test]
    fn ten_in_a_window_and_the_rest_is_counted() {
        let start = Instant::now();
        let mut counts = Counts::default();
        let admitted = (0..10_152_u32)
            .filter(|&event| counts.admit(&METADATA, start + Duration::from_micros(1) * event))
            .count();
        assert_eq!(admitted, 10);
        assert_eq!(counts.next_end(), Some(start + WINDOW));
        assert!(counts.left_out(Some(start + WINDOW / 2)).is_empty(), "the window is not over");
        let told: Vec<u64> =
            counts.left_out(Some(start + WINDOW)).iter().map(|it| it.count).collect();
        assert_eq!(told, [10_142]);
        assert_eq!(counts.next_end(), None);
        assert!(counts.admit(&METADATA, start + WINDOW), "a new window");
    }

    #[test]
    fn rare_events_are_all_logged() {
        let start = Instant::now();
        let mut counts = Counts::default();
        for event in 0..100 {
            assert!(counts.admit(&METADATA, start + WINDOW / 5 * event), "{event}");
        }
        assert!(counts.left_out(None).is_empty());
    }

    #[test]
    fn what_is_left_at_the_end_is_told() {
        let mut counts = Counts::default();
        let now = Instant::now();
        let admitted = (0..12).filter(|_| counts.admit(&METADATA, now)).count();
        assert_eq!((admitted, counts.left_out(None)[0].count), (10, 2));
    }
}
