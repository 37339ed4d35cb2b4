//! `cargo xtask power-cut`: what was COMPLETED and durable survives a reset of the target's machine.
//!
//! A guest offers files that lie on disks with volatile caches, and is reset amid WRITEs, as by a cut of its
//! power. Killing the process would prove nothing: the page cache survives it.

mod disk;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};

use self::disk::{Disk, lock};
use super::guest::Guest;
use super::image::Image;
use super::lab::Lab;
use super::link::{GUEST, Link, OURS};
use super::relay::Relay;
use super::row::{Process, await_that, tail};
use crate::{install, process, programs};

/// For a guest's node to be ready, for WRITEs to be COMPLETED, and for a check.
const LIMIT: Duration = Duration::from_secs(60);

/// A cut comes this long after enough was COMPLETED, at most.
const MAX_DELAY: Duration = Duration::from_millis(400);

/// WRITEs that are COMPLETED on each disk before a cut, at least.
const WRITES: usize = 100;

/// What the command line asks for.
pub(crate) struct Options {
    rounds: u32,
    seed: Option<u64>,
    lies: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { rounds: 3, seed: None, lies: false }
    }
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut number = || -> Result<u64> {
                let value = rest.next().with_context(|| format!("{argument} needs a value"))?;
                value.parse().with_context(|| format!("{argument} {value}: no number"))
            };
            match argument.as_str() {
                "--rounds" => options.rounds = u32::try_from(number()?)?.max(1),
                "--seed" => options.seed = Some(number()?),
                "--lying-disk" => options.lies = true,
                _ => bail!("power-cut has no option {argument}"),
            }
        }
        Ok(options)
    }
}

/// What is written on, and how.
struct Place {
    name: &'static str,
    /// In the guest.
    path: &'static str,
    /// Of `file_writes`.
    mode: &'static str,
    bytes: usize,
    /// A file system is on the disk, and the file on that.
    mounted: bool,
}

const DURABLE: &str = "write-durable";

/// In the order of the guest's disks.
const PLACES: [Place; 3] = [
    Place { name: "device", path: "/dev/vda", mode: DURABLE, bytes: 4 << 20, mounted: false },
    Place { name: "ext4", path: "/mnt/file", mode: DURABLE, bytes: 32 << 20, mounted: true },
    Place { name: "not durable", path: "/dev/vdc", mode: "write", bytes: 4 << 20, mounted: false },
];

/// Before the node starts. The file grows by what is written: its blocks are to be there too.
const PREPARE: &str = "mount -t ext4 /dev/vdb /mnt 2>/dev/null || { mkdir -p /mnt && mount -t ext4 /dev/vdb /mnt; } || exit 1
[ -e /mnt/file ] || { truncate -s 4M /mnt/file && sync; } || exit 1";

/// One place through all rounds.
struct Written {
    place: &'static Place,
    disk: Arc<Mutex<Disk>>,
    journal: PathBuf,
    /// Slots that a check found to be other than they must.
    lost: u64,
}

/// Runs the rounds, and prints what became of each.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(reason) = super::obstacle().or_else(no_mke2fs) {
        if process::everything_required() {
            bail!("power-cut: {reason}, and MILLSTREAM_REQUIRE=all");
        }
        eprintln!("xtask: power-cut: skipped: {reason}");
        return Ok(());
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let seed = options.seed.unwrap_or(now.as_nanos() as u64);
    eprintln!("xtask: power-cut --seed {seed}");
    let mut random = Random(seed | 1);
    let machine = Machine {
        ours: programs::millstream()?,
        writes: programs::file_writes()?,
        cable: programs::relay()?,
        image: Image::ensure()?,
    };
    let folder = process::target_directory().join("power-cut");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let mut written: Vec<Written> = PLACES
        .iter()
        .map(|place| {
            let bytes = if place.mounted {
                file_system(&folder, place.bytes)?
            } else {
                vec![0; place.bytes]
            };
            let disk = Arc::new(Mutex::new(Disk::new(bytes, options.lies)));
            let journal = folder.join(place.name.replace(' ', "-")).with_extension("journal");
            File::create(&journal)?;
            Ok(Written { place, disk, journal, lost: 0 })
        })
        .collect::<Result<_>>()?;
    for round in 1..=options.rounds {
        let boot = machine.boot(&written)?;
        if round > 1 {
            check(&machine, &boot, &mut written)?;
        }
        write(&machine, boot, &written, &mut random).with_context(|| format!("round {round}"))?;
    }
    let boot = machine.boot(&written)?;
    check(&machine, &boot, &mut written)?;
    drop(boot);
    verdict(&written)
}

/// What was durable is to be there. What was not is to be lost, or the test could not fail.
fn verdict(written: &[Written]) -> Result<()> {
    for Written { place, journal, lost, .. } in written {
        let count = completed(journal);
        println!("{:12} {count:6} WRITEs COMPLETED, {lost} slots not as they must be", place.name);
    }
    let (durable, control): (Vec<_>, Vec<_>) =
        written.iter().partition(|written| written.place.mode == DURABLE);
    if durable.iter().any(|written| written.lost > 0) {
        bail!("power-cut: what was COMPLETED and durable is not there");
    }
    if control.iter().all(|written| written.lost == 0) {
        bail!("power-cut: nothing was lost that was not durable either, so this shows nothing");
    }
    Ok(())
}

fn no_mke2fs() -> Option<String> {
    let missing = install::ensure(install::FOR_POWER_CUT);
    missing.first().map(|need| format!("{} is not installed", need.program))
}

/// The bytes of an empty file system.
fn file_system(folder: &Path, length: usize) -> Result<Vec<u8>> {
    let path = folder.join("ext4");
    File::create(&path)?.set_len(length as u64)?;
    let program = process::find_program("mke2fs").context("there is no mke2fs")?;
    process::run(Command::new(program).args(["-q", "-F", "-t", "ext4"]).arg(&path))?;
    let bytes = fs::read(&path)?;
    fs::remove_file(path)?;
    Ok(bytes)
}

/// What boots, and what runs at either side.
struct Machine {
    ours: PathBuf,
    writes: PathBuf,
    cable: PathBuf,
    image: Image,
}

/// A guest that offers its files. Fields are dropped in this order.
struct Boot {
    guest: Guest,
    _relay: Relay,
    lab: Lab,
    /// The names of the segments.
    segments: Vec<String>,
    disks: Vec<std::thread::JoinHandle<()>>,
}

impl Machine {
    fn boot(&self, written: &[Written]) -> Result<Boot> {
        let lab = Lab::new()?;
        let relay = Relay::start(&lab, &self.cable, Link::FIRST)?;
        let (mut disks, mut arguments) = (Vec::new(), Vec::new());
        for (index, Written { disk, .. }) in written.iter().enumerate() {
            let socket = lab.scratch().join(format!("disk{index}"));
            disks.push(disk::serve(disk, &socket)?);
            let path = socket.display();
            arguments.extend([
                "-blockdev".to_owned(),
                format!("driver=nbd,node-name=d{index},server.type=unix,server.path={path}"),
                "-device".to_owned(),
                format!("virtio-blk-pci,drive=d{index}"),
            ]);
        }
        let mut guest = Guest::boot_with(&self.image, "tcg", &lab, &relay, &arguments)?;
        let program = guest.lend(&self.ours)?;
        let offered: String =
            written.iter().map(|written| format!(" --offer-file={}", written.place.path)).collect();
        let node = guest.start(&format!(
            "{PREPARE}\nexec /host/{program} node --name=n --metadata=p2p --buffer=1MiB \
             --protocol=nvmeof --bind={GUEST}{offered}"
        ))?;
        let mut segments = Vec::new();
        await_that(LIMIT, || {
            segments = files(&node.output(), written);
            !segments.is_empty() || node.status().is_some()
        });
        if segments.is_empty() {
            bail!("the node in the guest is not ready: {}", tail(&node.output()));
        }
        Ok(Boot { guest, _relay: relay, lab, segments, disks })
    }

    /// `file_writes` at our side of the link.
    fn file_writes(&self, lab: &Lab, mode: &str, segment: &str, journal: &Path) -> Command {
        let mut command = lab.command(&self.writes);
        command.args([mode, OURS, segment]).arg(journal);
        command
    }
}

/// The segments in what a node says when it is ready, in the order of places.
fn files(said: &str, written: &[Written]) -> Vec<String> {
    let ready = said.lines().find_map(|line| line.strip_prefix("ready "));
    let ready = ready.and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    let Some(files) = ready.as_ref().and_then(|ready| ready["files"].as_array()) else {
        return Vec::new();
    };
    let names = files.iter().filter_map(serde_json::Value::as_str);
    let of = |written: &Written| {
        let name = written.place.path.rsplit('/').next()?;
        names.clone().find(|segment| segment.ends_with(&format!("/{name}"))).map(str::to_owned)
    };
    written.iter().map(of).collect::<Option<_>>().unwrap_or_default()
}

/// Has all places written to, and resets the machine amid that.
fn write(machine: &Machine, boot: Boot, written: &[Written], random: &mut Random) -> Result<()> {
    let before: Vec<_> = written.iter().map(|written| completed(&written.journal)).collect();
    let flushes: Vec<_> = written.iter().map(|written| lock(&written.disk).flushes).collect();
    let mut writers = Vec::new();
    for (Written { place, journal, .. }, segment) in written.iter().zip(&boot.segments) {
        let log = File::create(journal.with_extension("log"))?;
        let mut command = machine.file_writes(&boot.lab, place.mode, segment, journal);
        let child = command.stdout(log.try_clone()?).stderr(log).spawn();
        writers.push(Process(child.context("cannot start file_writes")?));
    }
    let enough = await_that(LIMIT, || {
        let mut counts = written.iter().zip(&before);
        counts.all(|(written, before)| completed(&written.journal) >= before + WRITES)
            || writers.iter_mut().any(|writer| writer.ended().is_some())
    });
    if !enough || writers.iter_mut().any(|writer| writer.ended().is_some()) {
        let logs: Vec<_> = written
            .iter()
            .map(|written| {
                let log = written.journal.with_extension("log");
                format!(
                    "{}: {}",
                    written.place.name,
                    tail(&fs::read_to_string(log).unwrap_or_default())
                )
            })
            .collect();
        bail!("not enough was written within {LIMIT:?}: {}", logs.join("; "));
    }
    // Not a wait for anything: the moment of the cut is to be any.
    sleep(MAX_DELAY.mul_f64((random.next() % 1000) as f64 / 1000.0));
    let Boot { guest, disks, .. } = boot;
    guest.reset();
    for disk in disks {
        let _ = disk.join();
    }
    for ((Written { place, disk, journal, .. }, before), flushed) in
        written.iter().zip(before).zip(flushes)
    {
        let mut disk = lock(disk);
        let cut = disk.cut(|| random.next() >> 17);
        eprintln!(
            "xtask: cut: {}: {} WRITEs COMPLETED, {} flushes, {} sectors in the cache lost and {} kept",
            place.name,
            completed(journal) - before,
            disk.flushes - flushed,
            cut.lost,
            cut.kept
        );
    }
    // They end when the connection is silent; it does not matter how.
    drop(writers);
    Ok(())
}

/// Compares all that is there with the journals.
fn check(machine: &Machine, boot: &Boot, written: &mut [Written]) -> Result<()> {
    for (Written { place, journal, lost, .. }, segment) in written.iter_mut().zip(&boot.segments) {
        let said = machine.file_writes(&boot.lab, "check", segment, journal).output()?;
        let text = String::from_utf8_lossy(&said.stdout);
        let found: serde_json::Value = serde_json::from_str(text.trim()).with_context(|| {
            format!("no check: {}", tail(&String::from_utf8_lossy(&said.stderr)))
        })?;
        let count = found["lost"].as_u64().context("no count in the check")?;
        eprintln!("xtask: check: {}: {}", place.name, text.trim());
        if count > 0 && place.mode == DURABLE {
            eprint!("{}", String::from_utf8_lossy(&said.stderr));
        }
        *lost += count;
    }
    Ok(())
}

/// How many WRITEs a journal says to be COMPLETED.
fn completed(journal: &Path) -> usize {
    let text = fs::read_to_string(journal).unwrap_or_default();
    text.lines().filter(|line| line.starts_with("completed ")).count()
}

/// xorshift64.
struct Random(u64);

impl Random {
    const fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
