//! Memory that goes bad raises SIGBUS. Where one of our routines was under way, it ends early and
//! says how far it came; anything else goes to whoever had the signal before.
//!
//! The handler calls nothing that is not safe in a handler: it reads three words, writes one
//! register, or puts the former handler back.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::Once;

/// The handler before ours.
struct Former(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once, inside `ARMED`, before the handler is there that reads it.
unsafe impl Sync for Former {}

static FORMER: Former = Former(UnsafeCell::new(MaybeUninit::uninit()));
static ARMED: Once = Once::new();

/// Catches SIGBUS from now on. Called before the first mapping is made.
pub(super) fn arm() {
    ARMED.call_once(|| {
        let former = FORMER.0.get().cast::<libc::sigaction>();
        // SAFETY: reads the present action into memory that nobody else uses yet.
        let read = unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), former) };
        if read != 0 {
            return;
        }
        // SAFETY: a sigaction of zeroes is a valid one.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        action.sa_sigaction = handle as *const () as usize;
        // SAFETY: the handler has the type that SA_SIGINFO asks for, and lives for ever.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    });
}

extern "C" fn handle(
    _signal: libc::c_int,
    _info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    if let Some(place) = instruction(context.cast()) {
        let (ours, exit) = super::engine::bounds();
        // SAFETY: `instruction` gives a place in the context, which the kernel has put on the stack
        // for this handler alone.
        let at = unsafe { place.read() };
        if usize::try_from(at).is_ok_and(|at| ours.contains(&at)) {
            // SAFETY: the same; what is written is where our routines end early.
            unsafe { place.write(i64::try_from(exit).unwrap_or(at)) };
            return;
        }
    }
    // SAFETY: `arm` has filled it before this handler was there.
    unsafe { libc::sigaction(libc::SIGBUS, FORMER.0.get().cast(), std::ptr::null_mut()) };
    // Whoever sent it, the former handler gets it as soon as this one returns.
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
