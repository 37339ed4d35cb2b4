//! How long something takes, and how much of that the machine took away from it.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked whether the machine goes on.
const PERIOD: Duration = Duration::from_millis(2);

/// Less than this is what timers and processors need anyway.
const SLACK: Duration = Duration::from_millis(1);

/// What times in `/proc` are counted in: the kernel's `USER_HZ`.
const TICK: Duration = Duration::from_millis(10);

/// Measures for a test how long something takes that has to be over within a bound.
///
/// A bound is a promise about the program, and a machine may be busy with something else, or stand
/// still: a virtual one for many tenths of a second. So what is compared with the bound is
/// [`Took::own`], the time less two things:
///
/// - stalls, as a thread notices them that wakes every few milliseconds. The time that it waits for
///   a processor is no stall: this process may be what it waits for.
/// - the processor time of other processes, divided by the number of processors. Processes of this
///   one's group are not others: they are what the test started.
#[derive(Clone, Debug)]
pub struct Stopwatch {
    start: Instant,
    stalled: Duration,
    usage: Usage,
}

/// What a [`Stopwatch`] shows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    /// Time that has passed.
    pub wall: Duration,
    /// How much of it the machine took away.
    pub held_up: Duration,
}

impl Stopwatch {
    /// Begins now.
    pub fn start() -> Self {
        let usage = Usage::now();
        Self { start: Instant::now(), stalled: STALLS.so_far(), usage }
    }

    /// What has passed since the start.
    pub fn took(&self) -> Took {
        let wall = self.start.elapsed();
        let stalled = STALLS.so_far().saturating_sub(self.stalled);
        let others = Usage::now().of_others_since(&self.usage);
        // Who waits for a timer loses nothing to others: so a bound still binds, within some multiple of itself.
        let others = others.min(wall.saturating_sub(stalled) / 4 * 3);
        Took { wall, held_up: wall.min(stalled + others) }
    }
}

impl Took {
    /// The time that is the program's own.
    pub fn own(&self) -> Duration {
        self.wall.saturating_sub(self.held_up)
    }
}

impl fmt::Display for Took {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3?}, of which the machine took away {:.3?}", self.wall, self.held_up)
    }
}

/// The thread that looks whether the machine goes on. There is one in a process.
static STALLS: LazyLock<&'static Stalls> = LazyLock::new(|| {
    let stalls: &'static Stalls = Box::leak(Box::new(Stalls(Mutex::new(Seen {
        last: Instant::now(),
        total: Duration::ZERO,
    }))));
    thread::Builder::new()
        .name("stalls".to_owned())
        .spawn(|| stalls.watch())
        .expect("a thread can be started");
    stalls
});

struct Stalls(Mutex<Seen>);

struct Seen {
    /// When the thread was awake last.
    last: Instant,
    total: Duration,
}

impl Stalls {
    fn watch(&self) -> ! {
        // It may be that this kernel does not count how long threads wait for a processor.
        let schedule = File::open("/proc/thread-self/schedstat").ok();
        let mut waited = waited(schedule.as_ref());
        loop {
            thread::sleep(PERIOD);
            let waited_before = std::mem::replace(&mut waited, self::waited(schedule.as_ref()));
            let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let late = (now - seen.last).saturating_sub(PERIOD);
            let stalled = late.saturating_sub(waited.saturating_sub(waited_before));
            if stalled >= SLACK {
                seen.total += stalled;
            }
            seen.last = now;
        }
    }

    /// With the one that the thread has not yet woken from.
    fn so_far(&self) -> Duration {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let late = seen.last.elapsed().saturating_sub(PERIOD);
        // While it is awake, or soon will be, it is no stall.
        seen.total + if late < 10 * SLACK { Duration::ZERO } else { late }
    }
}

/// How long this thread has waited for a processor. It allocates nothing: tests count that.
fn waited(schedule: Option<&File>) -> Duration {
    let mut bytes = [0; 80];
    let length = schedule.and_then(|file| file.read_at(&mut bytes, 0).ok()).unwrap_or(0);
    let text = std::str::from_utf8(&bytes[..length]).unwrap_or_default();
    let nanoseconds = text.split_ascii_whitespace().nth(1).and_then(|word| word.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

/// Processor time, in ticks.
#[derive(Clone, Debug)]
struct Usage {
    /// Of all processes since the machine was booted.
    all: u64,
    /// Of those of this one's group.
    own: u64,
    processors: u32,
}

impl Usage {
    fn now() -> Self {
        // What cannot be read is no excuse.
        let machine = fs::read_to_string("/proc/stat").unwrap_or_default();
        Self::of(&machine, of_group())
    }

    /// `machine` is the text of `/proc/stat`. The time of interrupts is left out, as they may be ours. So is
    /// what a hypervisor took: that is noticed as a stall.
    fn of(machine: &str, own: u64) -> Self {
        let processors = machine.lines().filter(|line| line.starts_with("cpu")).count().max(2) - 1;
        let words = machine.lines().next().unwrap_or_default().split_ascii_whitespace();
        // In user mode, at a low priority, in the kernel.
        let all = words.skip(1).take(3).filter_map(|word| word.parse::<u64>().ok()).sum();
        Self { all, own, processors: u32::try_from(processors).unwrap_or(1) }
    }

    /// The time that others took from each processor.
    fn of_others_since(&self, before: &Self) -> Duration {
        let [all, own] = [(self.all, before.all), (self.own, before.own)]
            .map(|(now, before)| now.saturating_sub(before));
        let ticks = u32::try_from(all.saturating_sub(own)).unwrap_or(u32::MAX);
        TICK.saturating_mul(ticks) / self.processors
    }
}

/// Ticks that processes of this one's group ran, and those that they waited for.
fn of_group() -> u64 {
    let Some((group, _)) = process("/proc/self/stat") else { return 0 };
    let Ok(folder) = fs::read_dir("/proc") else { return 0 };
    let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let names = folder.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| is_process(name))
        .filter_map(|name| process(&format!("/proc/{name}/stat")))
        .filter(|(of, _)| *of == group)
        .map(|(_, ticks)| ticks)
        .sum()
}

/// The group of a process, and the ticks that it and its children ran that have ended.
fn process(path: &str) -> Option<(u64, u64)> {
    let text = fs::read_to_string(path).ok()?;
    // Its name may have spaces and parentheses.
    let words: Vec<&str> = text.rsplit_once(") ")?.1.split_ascii_whitespace().collect();
    let number = |index: usize| words.get(index)?.parse::<u64>().ok();
    Some((number(2)?, (11..15).filter_map(number).sum()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    struct Process(Child);

    impl Drop for Process {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn time_in_which_a_process_is_stopped_is_not_its_own() {
        let stopwatch = Stopwatch::start();
        // It goes on when the shell says so, in mid-command.
        let status = shell("kill -STOP $PPID; sleep 0.5; kill -CONT $PPID").status().unwrap();
        assert!(status.success());
        let took = stopwatch.took();
        assert!(took.wall >= Duration::from_millis(500), "{took}");
        assert!(took.held_up >= Duration::from_millis(450), "{took}");
    }

    #[test]
    fn processor_time_of_others_is_not_its_own() {
        let processors = Usage::now().processors;
        let loops: Vec<Process> = (0..processors)
            .map(|_| shell("while :; do :; done").process_group(0).spawn().map(Process).unwrap())
            .collect();
        let (start, stopwatch) = (Instant::now(), Stopwatch::start());
        while stopwatch.took().held_up < Duration::from_millis(100) {
            assert!(start.elapsed() < LONG, "{}", stopwatch.took());
            thread::sleep(PERIOD);
        }
        drop(loops);
    }

    #[test]
    fn processor_time_of_its_own_processes_is_its_own() {
        let before = of_group();
        let child = Process(shell("while :; do :; done").spawn().unwrap());
        let start = Instant::now();
        while of_group() < before + 10 {
            assert!(start.elapsed() < LONG);
            thread::sleep(PERIOD);
        }
        drop(child);
        // Also of those that have ended.
        assert!(of_group() >= before + 10);
    }

    #[test]
    fn others_are_those_who_ran_and_are_not_of_the_group() {
        let usage = |user: u64, own| {
            let machine =
                format!("cpu  {user} 5 20 9000 100 30 40 50 0 0\ncpu0 1 1\ncpu1 1 1\nintr 7\n");
            Usage::of(&machine, own)
        };
        let since = |user, own| usage(user, own).of_others_since(&usage(1000, 100));
        assert_eq!(since(1050, 100), Duration::from_millis(250));
        assert_eq!(since(1050, 140), Duration::from_millis(50));
        assert_eq!(since(1050, 200), Duration::ZERO);
        // Where nothing can be read, nobody else runs.
        assert_eq!(Usage::of("", 7).of_others_since(&Usage::of("", 0)), Duration::ZERO);
    }
}
