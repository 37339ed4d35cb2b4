//! What `perf script` prints: of each sample the thread, and the chain of calls.

use std::ops::Range;
use std::path::Path;

/// A moment of a thread.
#[derive(Debug, PartialEq)]
pub(super) struct Sample {
    /// Its name, which the kernel cuts to 15 characters.
    pub(super) thread: String,
    /// Where it was, and who called: the innermost first.
    pub(super) chain: Vec<Frame>,
}

/// A place in a program or in the kernel.
#[derive(Debug, PartialEq)]
pub(super) struct Frame {
    pub(super) address: u64,
    pub(super) symbol: String,
    /// The file that it is of; `[kernel.kallsyms]` and the like in brackets.
    pub(super) object: String,
}

impl Frame {
    /// Whether it is the kernel's: also a module's, whose object is its name in brackets.
    pub(super) fn is_kernel(&self) -> bool {
        self.object.starts_with('[') && self.object != "[vdso]" && self.object != "[unknown]"
    }
}

/// Where code of the profiled program lies in memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Mapping {
    pub(super) addresses: Range<u64>,
    /// In the file.
    pub(super) offset: u64,
}

/// Takes apart what `perf script -F comm,tid,ip,sym,dso --show-mmap-events` printed: the samples,
/// and where `program` was mapped. Lines that are something else are left out.
pub(super) fn parse(text: &str, program: &Path) -> (Vec<Sample>, Vec<Mapping>) {
    let (mut samples, mut mappings) = (Vec::<Sample>::new(), Vec::new());
    for line in text.lines() {
        if line.starts_with(char::is_whitespace) {
            if let (Some(sample), Some(frame)) = (samples.last_mut(), frame(line)) {
                sample.chain.push(frame);
            }
        } else if line.contains(" PERF_RECORD_") {
            if Path::new(line.rsplit(' ').next().unwrap_or_default()) == program {
                mappings.extend(mapping(line));
            }
        } else if let Some((thread, _number)) = line.trim_end().rsplit_once(' ') {
            let thread = thread.trim_end().to_owned();
            samples.push(Sample { thread, chain: Vec::new() });
        }
    }
    samples.retain(|sample| !sample.chain.is_empty());
    (samples, mappings)
}

/// `  ffffffff81baeeb0 _copy_to_iter ([kernel.kallsyms])`
fn frame(line: &str) -> Option<Frame> {
    let (address, rest) = line.trim_start().split_once(' ')?;
    let (symbol, object) = rest.rsplit_once(" (")?;
    Some(Frame {
        address: u64::from_str_radix(address, 16).ok()?,
        symbol: symbol.to_owned(),
        object: object.trim_end().strip_suffix(')')?.to_owned(),
    })
}

/// `... PERF_RECORD_MMAP2 12/12: [0x563e9eafa000(0x4f2000) @ 0x184000 fe:00 65 30]: r-xp /bin/x`
fn mapping(line: &str) -> Option<Mapping> {
    let hexadecimal = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let (_, rest) = line.split_once('[')?;
    let (start, rest) = rest.split_once('(')?;
    let (length, rest) = rest.split_once(") @ ")?;
    let start = hexadecimal(start)?;
    let end = start.checked_add(hexadecimal(length)?)?;
    let offset = hexadecimal(rest.split([' ', ']']).next()?)?;
    Some(Mapping { addresses: start..end, offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCRIPT: &str = "\
millstream  12 PERF_RECORD_MMAP2 12/12: [0x5000(0x2000) @ 0x1000 fe:00 6 3]: r-xp /bin/x
millstream  12 PERF_RECORD_MMAP2 12/12: [0x9000(0x2000) @ 0 fe:00 6 3]: r-xp /lib/libc.so.6
soft-127.1.9.11  14\x20
\t ffffffff81baeeb0 _copy_to_iter ([kernel.kallsyms])
\t ffffffff820a67b0 udp_recvmsg ([kernel.kallsyms])

a thread    15\x20
\t            5010 <a::B<C> as d::E>::f (/bin/x)
\t               0 [unknown] ([unknown])

poster  16\x20

";

    #[test]
    fn samples_have_a_thread_and_a_chain() {
        let (samples, mappings) = parse(SCRIPT, Path::new("/bin/x"));
        let frame = |address, symbol: &str, object: &str| Frame {
            address,
            symbol: symbol.to_owned(),
            object: object.to_owned(),
        };
        let kernel = [
            frame(0xffff_ffff_81ba_eeb0, "_copy_to_iter", "[kernel.kallsyms]"),
            frame(0xffff_ffff_820a_67b0, "udp_recvmsg", "[kernel.kallsyms]"),
        ];
        let user =
            [frame(0x5010, "<a::B<C> as d::E>::f", "/bin/x"), frame(0, "[unknown]", "[unknown]")];
        assert!(kernel.iter().all(Frame::is_kernel) && !user.iter().any(Frame::is_kernel));
        let expected = [("soft-127.1.9.11", kernel), ("a thread", user)]
            .map(|(thread, chain)| Sample { thread: thread.to_owned(), chain: chain.into() });
        // That without a chain is left out.
        assert_eq!(samples, expected);
        assert_eq!(mappings, [Mapping { addresses: 0x5000..0x7000, offset: 0x1000 }]);
    }
}
