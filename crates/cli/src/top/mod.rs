//! `top`: what nodes and other processes move, live.
//!
//! A thread for each process asks it for its status (`client.rs`). Of two answers rates are made (`view.rs`), which
//! are shown as a table (`table.rs`) on a terminal (`terminal.rs`).

mod client;
mod table;
mod terminal;
mod view;

use std::io::{self, IsTerminal};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;

use self::client::{Answer, Target};
use self::terminal::{Key, Terminal};
use self::view::{Process, View};
use crate::failure::usage;
use crate::{output, process, units};

/// Where nodes are asked unless it is said: the port of exporters of metrics (`node --http 9464`).
const DEFAULT: &str = "127.0.0.1:9464";

/// The most processes at a time.
const MAX_TARGETS: usize = 256;

/// How often keys are looked for.
const GLANCE: Duration = Duration::from_millis(50);

/// Arguments of `top`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Processes that serve metrics, as `node --http` does [default: 127.0.0.1:9464]
    #[arg(value_name = "ADDR")]
    addresses: Vec<String>,
    /// How often to look
    #[arg(long, value_name = "D", default_value = "1s", value_parser = units::duration)]
    interval: Duration,
    /// Print one table, of one interval, and end; so it is where stdout is no terminal
    #[arg(long)]
    once: bool,
    /// Print one JSON object, of one interval, and end
    #[arg(long)]
    json: bool,
}

/// What is known of a process: its last two answers.
#[derive(Default)]
struct Known {
    before: Option<Answer>,
    last: Option<Result<Answer, String>>,
}

type Shared = Arc<Mutex<Known>>;

/// Runs `top`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let interval = arguments.interval;
    if interval < Duration::from_millis(50) || interval > Duration::from_secs(3600) {
        return Err(usage(format!("--interval {interval:?}: choose 50ms to 1h")));
    }
    let addresses = match &arguments.addresses[..] {
        [] => &[DEFAULT.to_owned()][..],
        given if given.len() > MAX_TARGETS => {
            return Err(usage(format!("{} addresses: {MAX_TARGETS} at most", given.len())));
        }
        given => given,
    };
    let parse = |text: &String| Target::parse(text).map_err(usage);
    let targets = addresses.iter().map(parse).collect::<anyhow::Result<Vec<_>>>()?;
    if arguments.json || arguments.once || !io::stdout().is_terminal() {
        return once(&targets, interval, arguments.json);
    }
    // Before there are threads.
    process::clean_up_when_told_to_stop()?;
    process::say_last_words_when_told_to_stop();
    watch(&targets, interval)?;
    process::step_back_when_told_to_stop();
    Ok(())
}

/// Two looks, and what was between them.
fn once(targets: &[Target], interval: Duration, json: bool) -> anyhow::Result<()> {
    let look = || -> Vec<Result<Answer, String>> {
        thread::scope(|scope| {
            let asking: Vec<_> = targets.iter().map(|it| scope.spawn(|| it.ask())).collect();
            let answer = |it: thread::ScopedJoinHandle<'_, _>| {
                it.join().unwrap_or_else(|_| Err("no answer".to_owned()))
            };
            asking.into_iter().map(answer).collect()
        })
    };
    let before = look();
    if before.iter().any(Result::is_ok) {
        thread::sleep(interval);
    }
    let after = look();
    if let Some(Err(error)) = after.first()
        && after.iter().all(Result::is_err)
    {
        bail!("{error}");
    }
    let processes = targets.iter().zip(&before).zip(&after);
    let processes = processes.map(|((target, before), after)| {
        Process::new(target.name(), before.as_ref().ok(), after.as_ref())
    });
    let view = View { processes: processes.collect() };
    if json {
        return output::json(&view);
    }
    output::line(&table::lines(&view, false).join("\n"))
}

/// Shows it until somebody ends it.
fn watch(targets: &[Target], interval: Duration) -> anyhow::Result<()> {
    let known: Vec<Shared> = targets.iter().map(|_| Shared::default()).collect();
    for (target, known) in targets.iter().zip(&known) {
        let (target, known) = (target.clone(), Arc::clone(known));
        // They end with the process.
        thread::Builder::new()
            .name("status".to_owned())
            .spawn(move || ask_again(&target, &known, interval))?;
    }
    let mut terminal = Terminal::open()?;
    loop {
        let processes = targets.iter().zip(&known).map(|(target, known)| {
            let known = known.lock().unwrap_or_else(PoisonError::into_inner);
            match &known.last {
                None => Process::asked(target.name()),
                Some(last) => Process::new(target.name(), known.before.as_ref(), last.as_ref()),
            }
        });
        let view = View { processes: processes.collect() };
        terminal.show(&table::lines(&view, true))?;
        let next = Instant::now() + interval;
        loop {
            let left = next.saturating_duration_since(Instant::now());
            if process::told_to_stop() || terminal.key(left.min(GLANCE))? == Some(Key::End) {
                return Ok(());
            }
            if left.is_zero() || terminal.was_resized() {
                break;
            }
        }
    }
}

/// Asks a process again and again.
fn ask_again(target: &Target, known: &Shared, interval: Duration) {
    loop {
        let started = Instant::now();
        let answer = target.ask();
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        known.before = known.last.take().and_then(Result::ok);
        known.last = Some(answer);
        drop(known);
        thread::sleep(interval.saturating_sub(started.elapsed()));
    }
}
