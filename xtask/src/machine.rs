//! What figures are of: the processor, the kernel, and whether anything else runs.

use std::fmt;
use std::fs;
use std::thread;

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The greatest load of the last minute that is called idle.
const IDLE: f64 = 0.3;

/// A machine, and how busy it was when this was asked.
#[derive(Debug, PartialEq)]
pub(crate) struct Machine {
    processor: String,
    cores: usize,
    kernel: String,
    /// Of the last minute.
    load: f64,
}

impl Machine {
    /// This one. Warns when it is not idle.
    pub(crate) fn here() -> Result<Self> {
        let read =
            |path: &str| fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
        let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let [processors, kernel, load] =
            [read("/proc/cpuinfo")?, read("/proc/sys/kernel/osrelease")?, read("/proc/loadavg")?];
        let machine = Self {
            processor: processor(&processors).to_owned(),
            cores,
            kernel: kernel.trim().to_owned(),
            load: first_load(&load).context("/proc/loadavg has no number")?,
        };
        if machine.load > IDLE {
            eprintln!(
                "xtask: warning: this machine is not idle (load {} in the last minute): figures \
                 will be of everything that runs",
                machine.load
            );
        }
        Ok(machine)
    }

    pub(crate) fn to_json(&self) -> Value {
        let Self { processor, cores, kernel, load } = self;
        json!({ "processor": processor, "cores": cores, "kernel": kernel, "load": load })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, cores, kernel, load } = self;
        write!(f, "{cores} cores of {processor}, Linux {kernel}, load {load} at the start")
    }
}

fn processor(cpuinfo: &str) -> &str {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let model = fields.find(|(name, _)| name.trim() == "model name");
    model.map_or("an unnamed processor", |(_, model)| model.trim())
}

fn first_load(loadavg: &str) -> Option<f64> {
    loadavg.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_tells_is_read() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2.6GHz\n\nmodel name\t: other\n";
        assert_eq!(processor(cpuinfo), "Some CPU @ 2.6GHz");
        assert_eq!(processor("Features : fp\n"), "an unnamed processor");
        assert_eq!(first_load("0.25 0.50 1.00 2/100 12345\n"), Some(0.25));
        assert_eq!(first_load(""), None);
    }
}
