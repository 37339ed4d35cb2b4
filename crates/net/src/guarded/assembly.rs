//! The instructions of x86-64 that touch such memory, in one piece, so that a handler of signals knows them
//! by their addresses.
//!
//! Each function follows the System V ABI, uses no stack, and returns 0 or the address of a fault in `rax`:
//! the handler puts it there, and goes on at `..._fault`, which returns.

use std::arch::{global_asm, x86_64::_mm_sfence};

use super::Fault;

const LINE: usize = 64;
const PAGE: usize = 4096;

/// Pages that are copied at a time around the caches: a line of each in turn, so that their loads
/// are streams for the processor's prefetchers, which do not go beyond a page.
const PAGES: usize = 4;
const TURN: usize = PAGES * PAGE;

/// So much ahead of a load, a store around the caches may hold it up: see [`trails`].
const HELD_UP: usize = 512;

/// And the processor's own copy.
const HELD_UP_STRING: usize = 32;

/// Copies of so many bytes are faster by the processor's own copy, where it has a good one.
const STRING: usize = 1024;

/// A line, from memory to registers.
macro_rules! load {
    ($from:literal, $offset:literal, $a:literal, $b:literal, $c:literal, $d:literal) => {
        concat!(
            "movdqu xmm",
            $a,
            ", [",
            $from,
            " + ",
            $offset,
            "]\n",
            "movdqu xmm",
            $b,
            ", [",
            $from,
            " + ",
            $offset,
            " + 16]\n",
            "movdqu xmm",
            $c,
            ", [",
            $from,
            " + ",
            $offset,
            " + 32]\n",
            "movdqu xmm",
            $d,
            ", [",
            $from,
            " + ",
            $offset,
            " + 48]\n",
        )
    };
}

/// And to memory.
macro_rules! store {
    ($store:literal, $to:literal, $offset:literal, $a:literal, $b:literal, $c:literal, $d:literal) => {
        concat!(
            $store,
            " [",
            $to,
            " + ",
            $offset,
            "], xmm",
            $a,
            "\n",
            $store,
            " [",
            $to,
            " + ",
            $offset,
            " + 16], xmm",
            $b,
            "\n",
            $store,
            " [",
            $to,
            " + ",
            $offset,
            " + 32], xmm",
            $c,
            "\n",
            $store,
            " [",
            $to,
            " + ",
            $offset,
            " + 48], xmm",
            $d,
            "\n",
        )
    };
}

/// A line of the stream whose place is at `rdi + $place`, from memory to two of the registers of AVX, and back.
macro_rules! load_wide {
    ($place:literal, $a:literal, $b:literal) => {
        concat!(
            "mov rcx, [rdi + ",
            $place,
            "]\n",
            "vmovdqu ymm",
            $a,
            ", [rcx + rdx]\n",
            "vmovdqu ymm",
            $b,
            ", [rcx + rdx + 32]\n",
        )
    };
}

macro_rules! store_wide {
    ($place:literal, $a:literal, $b:literal) => {
        concat!(
            "mov rcx, [rdi + ",
            $place,
            " + 8]\n",
            "vmovntdq [rcx + rdx], ymm",
            $a,
            "\n",
            "vmovntdq [rcx + rdx + 32], ymm",
            $b,
            "\n",
        )
    };
}

/// A line from where `rsi` is to where `rdi` is.
macro_rules! line {
    ($store:literal) => {
        concat!(
            load!("rsi", "0", "0", "1", "2", "3"),
            store!($store, "rdi", "0", "0", "1", "2", "3"),
        )
    };
}

/// A function that others of this program can call, and no other library.
macro_rules! function {
    ($name:literal, $($code:expr),* $(,)?) => {
        concat!(
            ".globl ", $name, "\n.hidden ", $name, "\n.type ", $name, ", @function\n",
            ".p2align 4\n", $name, ":\n.cfi_startproc\n",
            $($code,)*
            ".cfi_endproc\n.size ", $name, ", . - ", $name, "\n",
        )
    };
}

global_asm!(
    ".pushsection .text.millstream_guarded, \"ax\", @progbits",
    ".globl millstream_guarded_begin",
    ".hidden millstream_guarded_begin",
    "millstream_guarded_begin:",
    // rdi: to, rsi: from, rdx: length. Right for ranges that overlap, if `to` is below `from`.
    function!(
        "millstream_guarded_forward",
        "xor eax, eax\n",
        "cmp rdx, 64\n jb 3f\n",
        ".p2align 4\n",
        "2:\n",
        line!("movdqu"),
        "add rsi, 64\n add rdi, 64\n sub rdx, 64\n cmp rdx, 64\n jae 2b\n",
        "3: cmp rdx, 16\n jb 4f\n",
        "movdqu xmm0, [rsi]\n movdqu [rdi], xmm0\n",
        "add rsi, 16\n add rdi, 16\n sub rdx, 16\n jmp 3b\n",
        "4: cmp rdx, 8\n jb 5f\n",
        "mov rcx, [rsi]\n mov [rdi], rcx\n",
        "add rsi, 8\n add rdi, 8\n sub rdx, 8\n",
        "5: test rdx, rdx\n jz 7f\n",
        "6: mov cl, [rsi]\n mov [rdi], cl\n",
        "inc rsi\n inc rdi\n dec rdx\n jnz 6b\n",
        "7: ret\n",
    ),
    // The same where the ranges do not overlap, by the processor's own copy: `rep movsb` leaves off at a
    // fault as any other instruction.
    function!(
        "millstream_guarded_string",
        "xor eax, eax\n",
        "mov rcx, rdx\n",
        "rep movsb\n",
        "ret\n",
    ),
    // The same from the end, for `to` above `from`.
    function!(
        "millstream_guarded_backward",
        "xor eax, eax\n",
        "add rsi, rdx\n add rdi, rdx\n",
        "cmp rdx, 64\n jb 3f\n",
        ".p2align 4\n",
        "2: sub rsi, 64\n sub rdi, 64\n",
        line!("movdqu"),
        "sub rdx, 64\n cmp rdx, 64\n jae 2b\n",
        "3: test rdx, rdx\n jz 5f\n",
        "4: dec rsi\n dec rdi\n",
        "mov cl, [rsi]\n mov [rdi], cl\n",
        "dec rdx\n jnz 4b\n",
        "5: ret\n",
    ),
    // rdi: to, a multiple of 64, rsi: from, rdx: lines. One after the other around the caches.
    function!(
        "millstream_guarded_lines",
        "xor eax, eax\n",
        "test rdx, rdx\n jz 3f\n",
        ".p2align 4\n",
        "2:\n",
        line!("movntdq"),
        "add rsi, 64\n add rdi, 64\n dec rdx\n jnz 2b\n",
        "3: ret\n",
    ),
    // rdi: to, a multiple of 64, rsi: from, rdx: how many times four pages. All four lines are loaded before the first is
    // stored: see `trails`.
    function!(
        "millstream_guarded_around",
        "xor eax, eax\n",
        "test rdx, rdx\n jz 4f\n",
        "2: mov ecx, 64\n",
        "3:\n",
        load!("rsi", "0", "0", "1", "2", "3"),
        load!("rsi", "4096", "4", "5", "6", "7"),
        load!("rsi", "8192", "8", "9", "10", "11"),
        load!("rsi", "12288", "12", "13", "14", "15"),
        store!("movntdq", "rdi", "0", "0", "1", "2", "3"),
        store!("movntdq", "rdi", "4096", "4", "5", "6", "7"),
        store!("movntdq", "rdi", "8192", "8", "9", "10", "11"),
        store!("movntdq", "rdi", "12288", "12", "13", "14", "15"),
        "add rsi, 64\n add rdi, 64\n dec ecx\n jnz 3b\n",
        // Of four pages, one has been passed.
        "add rsi, 12288\n add rdi, 12288\n dec rdx\n jnz 2b\n",
        "4: ret\n",
    ),
    // rdi: four times where from and where to, which is a multiple of 16; rsi: lines of each. A line of each
    // in turn, all loaded before the first is stored.
    function!(
        "millstream_guarded_four",
        "mov rax, rsi\n",
        "mov rcx, [rdi]\n mov rdx, [rdi + 8]\n",
        "mov r8, [rdi + 16]\n mov r9, [rdi + 24]\n",
        "mov r10, [rdi + 32]\n mov r11, [rdi + 40]\n",
        "mov rsi, [rdi + 48]\n mov rdi, [rdi + 56]\n",
        "test rax, rax\n jz 3f\n",
        ".p2align 4\n",
        "2:\n",
        load!("rcx", "0", "0", "1", "2", "3"),
        load!("r8", "0", "4", "5", "6", "7"),
        load!("r10", "0", "8", "9", "10", "11"),
        load!("rsi", "0", "12", "13", "14", "15"),
        store!("movntdq", "rdx", "0", "0", "1", "2", "3"),
        store!("movntdq", "r9", "0", "4", "5", "6", "7"),
        store!("movntdq", "r11", "0", "8", "9", "10", "11"),
        store!("movntdq", "rdi", "0", "12", "13", "14", "15"),
        "add rcx, 64\n add rdx, 64\n add r8, 64\n add r9, 64\n",
        "add r10, 64\n add r11, 64\n add rsi, 64\n add rdi, 64\n",
        "dec rax\n jnz 2b\n",
        "3: ret\n",
    ),
    // The same of eight, whose places stay in the list, and by the registers of AVX: sixteen of 32 bytes hold
    // their lines. rdi: eight times where from and where to, which is a multiple of 32.
    function!(
        "millstream_guarded_eight",
        "xor eax, eax\n xor edx, edx\n",
        "shl rsi, 6\n jz 3f\n",
        ".p2align 4\n",
        "2:\n",
        load_wide!("0", "0", "1"),
        load_wide!("16", "2", "3"),
        load_wide!("32", "4", "5"),
        load_wide!("48", "6", "7"),
        load_wide!("64", "8", "9"),
        load_wide!("80", "10", "11"),
        load_wide!("96", "12", "13"),
        load_wide!("112", "14", "15"),
        store_wide!("0", "0", "1"),
        store_wide!("16", "2", "3"),
        store_wide!("32", "4", "5"),
        store_wide!("48", "6", "7"),
        store_wide!("64", "8", "9"),
        store_wide!("80", "10", "11"),
        store_wide!("96", "12", "13"),
        store_wide!("112", "14", "15"),
        "add rdx, 64\n cmp rdx, rsi\n jb 2b\n",
        // Not after a fault: that costs time, and nothing else.
        "vzeroupper\n",
        "3: ret\n",
    ),
    // rdi: a byte to read.
    function!("millstream_guarded_probe", "xor eax, eax\n", "mov cl, [rdi]\n", "ret\n"),
    // rdi: a byte to write as it is.
    function!(
        "millstream_guarded_probe_write",
        "xor eax, eax\n",
        "lock add byte ptr [rdi], 0\n",
        "ret\n",
    ),
    function!("millstream_guarded_fault", "ret\n"),
    ".popsection",
);

unsafe extern "C" {
    fn millstream_guarded_begin();
    fn millstream_guarded_forward(to: *mut u8, from: *const u8, length: usize) -> usize;
    fn millstream_guarded_string(to: *mut u8, from: *const u8, length: usize) -> usize;
    fn millstream_guarded_backward(to: *mut u8, from: *const u8, length: usize) -> usize;
    fn millstream_guarded_lines(to: *mut u8, from: *const u8, lines: usize) -> usize;
    fn millstream_guarded_around(to: *mut u8, from: *const u8, turns: usize) -> usize;
    fn millstream_guarded_four(places: *const [*const u8; 2], lines: usize) -> usize;
    fn millstream_guarded_eight(places: *const [*const u8; 2], lines: usize) -> usize;
    fn millstream_guarded_probe(address: *const u8) -> usize;
    fn millstream_guarded_probe_write(address: *mut u8) -> usize;
    fn millstream_guarded_fault();
}

/// Where to go on after a fault at `instruction`, if that is one of these.
pub(super) fn recovery(instruction: usize) -> Option<usize> {
    let address = |function: unsafe extern "C" fn()| function as *const () as usize;
    let fault = address(millstream_guarded_fault);
    (address(millstream_guarded_begin)..fault).contains(&instruction).then_some(fault)
}

#[inline]
fn result(fault: usize) -> Result<(), Fault> {
    match fault {
        0 => Ok(()),
        address => Err(Fault { address: address as u64 }),
    }
}

/// # Safety
/// As of [`super::copy`], and `to` is not in `from..from + length`.
#[inline]
pub(super) unsafe fn copy_forward(
    from: *const u8,
    to: *mut u8,
    length: usize,
) -> Result<(), Fault> {
    let apart = from.addr().abs_diff(to.addr()) >= length;
    let held_up = trails(from, to, HELD_UP_STRING);
    let string = length >= STRING && apart && !held_up && is_x86_feature_detected!("ermsb");
    // SAFETY: the caller promises it.
    result(unsafe {
        match string {
            true => millstream_guarded_string(to, from, length),
            false => millstream_guarded_forward(to, from, length),
        }
    })
}

/// # Safety
/// As of [`super::copy`], and `from` is not in `to..to + length`.
#[inline]
pub(super) unsafe fn copy_backward(
    from: *const u8,
    to: *mut u8,
    length: usize,
) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    result(unsafe { millstream_guarded_backward(to, from, length) })
}

/// Whether loads along `from` come soon after stores along `to` that have the same place in their pages: a processor that
/// compares no more of addresses has a load wait until such a store is done, which takes long around the caches where several
/// streams are stored by turns. On a Zen 3, four streams took four times as long so, and one after the other never does.
///
/// There the processor's own copy is held up as well, within a few bytes: by ten times.
#[inline]
fn trails(from: *const u8, to: *const u8, within: usize) -> bool {
    (1..within).contains(&(to.addr().wrapping_sub(from.addr()) % PAGE))
}

/// Copies around the caches, and returns how much it has copied: not the end, which is short.
///
/// # Safety
/// As of [`super::copy`], and the ranges do not overlap.
pub(super) unsafe fn copy_around(
    from: *const u8,
    to: *mut u8,
    length: usize,
) -> Result<usize, Fault> {
    let head = to.addr().wrapping_neg() % LINE;
    if length < head + TURN {
        return Ok(0);
    }
    let turns = (length - head) / TURN;
    // SAFETY: the head and the turns are within the ranges, and the turns begin at a line of `to`.
    let copied = unsafe {
        copy_forward(from, to, head)?;
        let (from, to) = (from.wrapping_add(head), to.wrapping_add(head));
        let copied = match trails(from, to, HELD_UP) {
            true => millstream_guarded_lines(to, from, turns * (TURN / LINE)),
            false => millstream_guarded_around(to, from, turns),
        };
        // Such stores are ordered with nothing: whoever is told of them later must see them.
        _mm_sfence();
        copied
    };
    result(copied).map(|()| head + turns * TURN)
}

/// Orders the stores of [`copy_together`] before all that follow: they are ordered with nothing.
pub(super) fn fence() {
    // SAFETY: all x86-64 processors have it.
    unsafe { _mm_sfence() };
}

/// Copies these ranges of one length around the caches.
///
/// # Safety
/// As of [`super::copy_together`].
pub(super) unsafe fn copy_together(
    ranges: &[(*const u8, *mut u8)],
    length: usize,
) -> Result<(), Fault> {
    let (mut ranges, wide) = (ranges, is_x86_feature_detected!("avx"));
    // SAFETY: the caller promises it.
    unsafe {
        while wide && let Some((eight, rest)) = ranges.split_first_chunk::<8>() {
            copy_streams(eight, length, millstream_guarded_eight)?;
            ranges = rest;
        }
        while let Some((four, rest)) = ranges.split_first_chunk::<4>() {
            copy_streams(four, length, millstream_guarded_four)?;
            ranges = rest;
        }
        ranges.iter().try_for_each(|&(from, to)| copy_forward(from, to, length))
    }
}

/// # Safety
/// As of [`super::copy_together`]; `lines` copies so many streams, each from where and to where it is told, so many lines
/// from the beginning of a line at the target.
unsafe fn copy_streams<const STREAMS: usize>(
    ranges: &[(*const u8, *mut u8); STREAMS],
    length: usize,
    copy_lines: unsafe extern "C" fn(*const [*const u8; 2], usize) -> usize,
) -> Result<(), Fault> {
    let head = |to: *mut u8| (to.addr().wrapping_neg() % LINE).min(length);
    let lines = ranges.iter().map(|(_, to)| (length - head(*to)) / LINE).min().unwrap_or(0);
    let places =
        ranges.map(|(from, to)| [from, to.cast_const()].map(|it| it.wrapping_add(head(to))));
    // Where only some do, several streams are faster all the same.
    let is_held_up = places.iter().all(|[from, to]| trails(*from, *to, HELD_UP));
    // SAFETY: the heads, the lines and the ends are within the ranges, and the lines begin at lines of where
    // they go.
    unsafe {
        for &(from, to) in ranges {
            copy_rest(from, to, head(to))?;
        }
        if is_held_up {
            for [from, to] in places {
                result(millstream_guarded_lines(to.cast_mut(), from, lines))?;
            }
        } else {
            result(copy_lines(places.as_ptr(), lines))?;
        }
        for &(from, to) in ranges {
            let done = head(to) + lines * LINE;
            copy_rest(from.wrapping_add(done), to.wrapping_add(done), length - done)?;
        }
    }
    Ok(())
}

/// [`copy_forward`] of what is often nothing.
///
/// # Safety
/// As there.
#[inline]
unsafe fn copy_rest(from: *const u8, to: *mut u8, length: usize) -> Result<(), Fault> {
    match length {
        0 => Ok(()),
        // SAFETY: the caller promises it.
        _ => unsafe { copy_forward(from, to, length) },
    }
}

/// # Safety
/// As for what [`super::copy`] reads.
pub(super) unsafe fn probe(address: *const u8) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    result(unsafe { millstream_guarded_probe(address) })
}

/// # Safety
/// As for what [`super::copy`] writes.
pub(super) unsafe fn probe_write(address: *mut u8) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    result(unsafe { millstream_guarded_probe_write(address) })
}
