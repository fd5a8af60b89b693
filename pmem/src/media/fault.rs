//! Memory that goes bad raises SIGBUS. If one of our routines was running, it ends early and
//! returns how far it came; any other fault is passed to the previous handler.
//!
//! The handler calls nothing that is not safe in a handler, and takes no lock: it reads the context
//! and the table of mappings, writes one register, or hands the signal on. It does not run again
//! inside itself (no `SA_NODEFER`): a second fault would be one of its own, and the kernel ends the
//! process for that. A thread that blocks SIGBUS is not protected; no thread of this project does.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The handler before ours.
struct Former(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once, inside `ARMED`, before the handler is there that reads it.
unsafe impl Sync for Former {}

static FORMER: Former = Former(UnsafeCell::new(MaybeUninit::uninit()));
static ARMED: OnceLock<Result<(), i32>> = OnceLock::new();

/// Catches SIGBUS from now on. Called before the first mapping is made.
///
/// # Errors
/// The kernel refuses: nothing may be mapped then, as bad memory would end the process.
pub(super) fn arm() -> std::io::Result<()> {
    let armed = ARMED.get_or_init(|| {
        let failed = || std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        let former = FORMER.0.get().cast::<libc::sigaction>();
        // SAFETY: reads the present action into memory that is not shared yet.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), former) } != 0 {
            return Err(failed());
        }
        // SAFETY: a sigaction of zeroes is a valid one.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        action.sa_sigaction = handle as *const () as usize;
        let ours = &raw const action;
        // SAFETY: the handler has the type that SA_SIGINFO asks for, and lives for ever.
        match unsafe { libc::sigaction(libc::SIGBUS, ours, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(failed()),
        }
    });
    armed.map_err(std::io::Error::from_raw_os_error)
}

/// Limit of mappings that the handler knows: a pool has one for each of its devices, so this is
/// plenty. Further ones are served like the others, except for the effect of [`Known`].
const MAPPINGS: usize = 256;
/// First and last byte of each; nothing where the last one is 0.
static TABLE: [(AtomicUsize, AtomicUsize); MAPPINGS] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; MAPPINGS];

/// A mapping that the handler knows of until this is dropped. A host may notify processes early of
/// bad memory that none of them has accessed (`memory_failure_early_kill`), by a signal whose
/// default is to end them. For a known mapping it is ignored, since an access to that memory raises
/// another signal.
#[derive(Debug)]
pub(super) struct Known(Option<usize>);

impl Known {
    /// Registers a mapping with the handler.
    pub(super) fn new(range: &Range<usize>) -> Self {
        let last = range.end.saturating_sub(1);
        let take = |(first, end): &(AtomicUsize, AtomicUsize)| {
            // An entry is not used before its first byte is set: it is at the end of memory until
            // then.
            let (free, taken) = (Ordering::AcqRel, Ordering::Relaxed);
            first.compare_exchange(0, usize::MAX, free, taken).ok()?;
            end.store(last, Ordering::Release);
            first.store(range.start, Ordering::Release);
            Some(())
        };
        Self(TABLE.iter().position(|entry| take(entry).is_some()))
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        if let Some((first, end)) = self.0.and_then(|index| TABLE.get(index)) {
            end.store(0, Ordering::Release);
            first.store(0, Ordering::Release);
        }
    }
}

fn is_known(address: usize) -> bool {
    TABLE.iter().any(|(first, end)| {
        let first = first.load(Ordering::Acquire);
        first != 0 && first <= address && address <= end.load(Ordering::Acquire)
    })
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands the handler a whole description of the signal.
    let details = unsafe { &*info };
    let code = details.si_code;
    // A code above zero comes from the kernel; others come from a process.
    let is_fault = code > 0 && code != libc::BUS_MCEERR_AO;
    if is_fault && goes_on(context.cast()) {
        return;
    }
    if code == libc::BUS_MCEERR_AO {
        // SAFETY: signals of this code have an address.
        let address = unsafe { details.si_addr() };
        if is_known(address.addr()) {
            return;
        }
    }
    hand_on(is_fault, signal, info, context);
}

/// Continues one of our routines at its early exit. Returns whether it was one.
fn goes_on(context: *mut libc::ucontext_t) -> bool {
    let Some(place) = instruction(context) else { return false };
    // SAFETY: `instruction` gives a place in the context, which the kernel has put on the stack
    // for this handler alone.
    let at = unsafe { place.read() };
    let exit = usize::try_from(at).ok().and_then(super::engine::exit_of);
    let Some(exit) = exit.and_then(|exit| i64::try_from(exit).ok()) else { return false };
    // SAFETY: the same; the written address is the early exit of our routines.
    unsafe { place.write(exit) };
    true
}

/// To the handler before ours if there was one, and it is a fault; else the process ends, as it
/// does without a handler.
fn hand_on(
    is_fault: bool,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let former = FORMER.0.get().cast::<libc::sigaction>();
    // SAFETY: `arm` has filled it before this handler was there.
    let former = unsafe { former.read() };
    let (place, flags) = (former.sa_sigaction, former.sa_flags);
    if is_fault && place != libc::SIG_DFL && place != libc::SIG_IGN {
        if flags & libc::SA_SIGINFO != 0 {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: with this flag the address is that of such a function.
            let handler = unsafe { std::mem::transmute::<usize, Handler>(place) };
            handler(signal, info, context);
        } else {
            // SAFETY: without the flag the address is that of such a function.
            let handler =
                unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(place) };
            handler(signal);
        }
        return;
    }
    // SAFETY: safe in a handler.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    // It comes as soon as this handler has returned.
    // SAFETY: safe in a handler.
    unsafe { libc::raise(libc::SIGBUS) };
}

/// Where in the context the address of the instruction is.
#[cfg(target_arch = "x86_64")]
fn instruction(context: *mut libc::ucontext_t) -> Option<*mut i64> {
    let at = usize::try_from(libc::REG_RIP).ok()?;
    // SAFETY: the kernel hands the handler a whole context.
    let registers = unsafe { &raw mut (*context).uc_mcontext.gregs };
    Some(registers.cast::<i64>().wrapping_add(at))
}

#[cfg(not(target_arch = "x86_64"))]
fn instruction(_context: *mut libc::ucontext_t) -> Option<*mut i64> {
    None
}
