//! The handler of SIGSEGV and SIGBUS that ends an access in place of the process.

use std::io;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use super::assembly;

const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// What was done about each of the signals before. It is there before the handler is, and is never freed: a
/// handler may be looking at it.
static BEFORE: [AtomicPtr<libc::sigaction>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];

/// From here on, a fault in an access of this module ends that access. Other faults are handled as they
/// were. It lasts until somebody installs handlers that do not call those of before.
pub fn recover() -> io::Result<()> {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    static INSTALLING: Mutex<()> = Mutex::new(());
    // Without the lock, which a thread may have had that a process which was forked off has not.
    if INSTALLED.load(Ordering::Acquire) {
        return Ok(());
    }
    let _alone = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if INSTALLED.load(Ordering::Acquire) {
        return Ok(());
    }
    for (signal, before) in SIGNALS.into_iter().zip(&BEFORE) {
        // SAFETY: plain old data, of which zeros are a valid value.
        let (mut old, mut new, mut replaced): (libc::sigaction, libc::sigaction, libc::sigaction) =
            unsafe { mem::zeroed() };
        let own = handle as *const () as libc::sighandler_t;
        // SAFETY: all are alive during the calls, and the handler does only what may be done in one: it
        // looks at statics and at its arguments.
        unsafe {
            if libc::sigaction(signal, ptr::null(), &raw mut old) != 0 {
                return Err(io::Error::last_os_error());
            }
            if old.sa_sigaction == own {
                // The attempt before got as far as this.
                continue;
            }
            before.store(Box::into_raw(Box::new(old)), Ordering::Release);
            new.sa_sigaction = own;
            // On the stack for signals where the thread has one, as after its own has overflowed. With
            // SA_NODEFER the handler of before may fault itself, or leave by siglongjmp.
            new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | (old.sa_flags & libc::SA_NODEFER);
            new.sa_mask = old.sa_mask;
            if libc::sigaction(signal, &raw const new, &raw mut replaced) != 0 {
                return Err(io::Error::last_os_error());
            }
            if replaced.sa_sigaction != old.sa_sigaction {
                // Somebody else's, between the two calls.
                before.store(Box::into_raw(Box::new(replaced)), Ordering::Release);
            }
        }
    }
    INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// What the kernel calls.
unsafe extern "C" fn handle(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel gives both to a handler with SA_SIGINFO.
    let (code, address, registers) = unsafe {
        let context = context.cast::<libc::ucontext_t>();
        ((*info).si_code, (*info).si_addr().addr(), &mut (*context).uc_mcontext.gregs)
    };
    let instruction = registers[libc::REG_RIP as usize] as usize;
    if is_of_instruction(signal, code)
        && let Some(recovery) = assembly::recovery(instruction)
    {
        // An address that no memory can have is not told.
        registers[libc::REG_RAX as usize] = address.max(1) as i64;
        registers[libc::REG_RIP as usize] = recovery as i64;
        return;
    }
    // SAFETY: what the kernel gave to us.
    unsafe { pass_on(signal, info, context) };
}

/// Whether a signal is of the instruction at which it comes. Positive codes are of the kernel: others can send
/// signals, too. Of these, one tells of memory that is broken, whatever is executed at the time.
const fn is_of_instruction(signal: libc::c_int, code: libc::c_int) -> bool {
    code > 0 && !(signal == libc::SIGBUS && code == libc::BUS_MCEERR_AO)
}

/// Does what would be done without this module.
///
/// # Safety
/// The arguments are those of a handler.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let index = SIGNALS.iter().position(|&each| each == signal);
    // SAFETY: null, or what is never freed nor changed.
    let before = index.and_then(|index| unsafe { BEFORE[index].load(Ordering::Acquire).as_ref() });
    // SAFETY: the kernel gives it.
    let of_instruction = is_of_instruction(signal, unsafe { (*info).si_code });
    // SAFETY: a handler is called as it was to be called by the kernel; the calls are such as may be made in
    // one. Without a handler the signal comes again, and ends the process.
    unsafe {
        match before {
            Some(before) if ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) => {
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    type Handler =
                        unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
                    let handler: Handler =
                        mem::transmute::<libc::sighandler_t, Handler>(before.sa_sigaction);
                    handler(signal, info, context);
                } else {
                    type Handler = unsafe extern "C" fn(libc::c_int);
                    let handler: Handler =
                        mem::transmute::<libc::sighandler_t, Handler>(before.sa_sigaction);
                    handler(signal);
                }
            }
            Some(before) if before.sa_sigaction == libc::SIG_IGN && !of_instruction => {}
            _ => {
                let mut default: libc::sigaction = mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, ptr::null_mut());
                if !of_instruction {
                    // Not of an instruction that would be executed again.
                    libc::raise(signal);
                }
            }
        }
    }
}
