//! The routines that touch mapped memory, in assembly: memory can go bad under a load or a store,
//! and the handler of that signal has to find the position within the routine.
//!
//! Between `blockd_pmem_begin` and `blockd_pmem_end` the same holds everywhere: nothing is on the
//! stack but the return address, and `rdx` has the bytes that are left. The handler in
//! [`super::fault`] lets a routine go on at `blockd_pmem_exit`, which returns them.
//!
//! Stores past the cache win at every size that was tried, with 16 bytes at a time as fast as with
//! more: decision 0014 has the figures.

use std::arch::global_asm;
use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes of a cache line: the unit of non-temporal stores and of write-back.
pub(super) const LINE: usize = 64;

global_asm!(
    ".pushsection .text.blockd_pmem,\"ax\",@progbits",
    ".balign 64",
    ".globl blockd_pmem_begin",
    ".hidden blockd_pmem_begin",
    "blockd_pmem_begin:",
    // rdi: to, rsi: from, rdx: bytes. An aligned word is loaded and stored as a whole.
    ".globl blockd_pmem_copy",
    ".hidden blockd_pmem_copy",
    "blockd_pmem_copy:",
    "cmp rdx, 64",
    "jb 3f",
    ".balign 16",
    "2:",
    "movdqu xmm0, [rsi]",
    "movdqu xmm1, [rsi + 16]",
    "movdqu xmm2, [rsi + 32]",
    "movdqu xmm3, [rsi + 48]",
    "movdqu [rdi], xmm0",
    "movdqu [rdi + 16], xmm1",
    "movdqu [rdi + 32], xmm2",
    "movdqu [rdi + 48], xmm3",
    "add rsi, 64",
    "add rdi, 64",
    "sub rdx, 64",
    "cmp rdx, 64",
    "jae 2b",
    "3:",
    "cmp rdx, 8",
    "jb 4f",
    "mov rax, [rsi]",
    "mov [rdi], rax",
    "add rsi, 8",
    "add rdi, 8",
    "sub rdx, 8",
    "jmp 3b",
    "4:",
    "test rdx, rdx",
    "jz blockd_pmem_exit",
    "mov al, [rsi]",
    "mov [rdi], al",
    "inc rsi",
    "inc rdi",
    "dec rdx",
    "jmp 4b",
    // rdi: to, aligned to a line, rsi: from, rdx: bytes, whole lines.
    ".globl blockd_pmem_stream",
    ".hidden blockd_pmem_stream",
    "blockd_pmem_stream:",
    "test rdx, rdx",
    "jz blockd_pmem_exit",
    ".balign 16",
    "5:",
    "movdqu xmm0, [rsi]",
    "movdqu xmm1, [rsi + 16]",
    "movdqu xmm2, [rsi + 32]",
    "movdqu xmm3, [rsi + 48]",
    "movntdq [rdi], xmm0",
    "movntdq [rdi + 16], xmm1",
    "movntdq [rdi + 32], xmm2",
    "movntdq [rdi + 48], xmm3",
    "add rsi, 64",
    "add rdi, 64",
    "sub rdx, 64",
    "jnz 5b",
    "jmp blockd_pmem_exit",
    // rdi: to, aligned to a line, rdx: bytes of zeroes, whole lines.
    ".globl blockd_pmem_zero",
    ".hidden blockd_pmem_zero",
    "blockd_pmem_zero:",
    "pxor xmm0, xmm0",
    "test rdx, rdx",
    "jz blockd_pmem_exit",
    "6:",
    "movntdq [rdi], xmm0",
    "movntdq [rdi + 16], xmm0",
    "movntdq [rdi + 32], xmm0",
    "movntdq [rdi + 48], xmm0",
    "add rdi, 64",
    "sub rdx, 64",
    "jnz 6b",
    "jmp blockd_pmem_exit",
    // rdi: the first line, rdx: bytes, whole lines, written back without being given up.
    ".globl blockd_pmem_clwb",
    ".hidden blockd_pmem_clwb",
    "blockd_pmem_clwb:",
    "test rdx, rdx",
    "jz blockd_pmem_exit",
    "7:",
    "clwb [rdi]",
    "add rdi, 64",
    "sub rdx, 64",
    "jnz 7b",
    "jmp blockd_pmem_exit",
    // The same, given up, in any order.
    ".globl blockd_pmem_clflushopt",
    ".hidden blockd_pmem_clflushopt",
    "blockd_pmem_clflushopt:",
    "test rdx, rdx",
    "jz blockd_pmem_exit",
    "8:",
    "clflushopt [rdi]",
    "add rdi, 64",
    "sub rdx, 64",
    "jnz 8b",
    "jmp blockd_pmem_exit",
    // The same, one after the other.
    ".globl blockd_pmem_clflush",
    ".hidden blockd_pmem_clflush",
    "blockd_pmem_clflush:",
    "test rdx, rdx",
    "jz blockd_pmem_exit",
    "9:",
    "clflush [rdi]",
    "add rdi, 64",
    "sub rdx, 64",
    "jnz 9b",
    ".globl blockd_pmem_exit",
    ".hidden blockd_pmem_exit",
    "blockd_pmem_exit:",
    "mov rax, rdx",
    "ret",
    ".globl blockd_pmem_end",
    ".hidden blockd_pmem_end",
    "blockd_pmem_end:",
    // rdi: to, rsi: from, rdx: bytes. By the processor's own routine, which keeps the remaining
    // length in rcx, and ends after it where memory is bad.
    ".balign 16",
    ".globl blockd_pmem_move",
    ".hidden blockd_pmem_move",
    "blockd_pmem_move:",
    "mov rcx, rdx",
    "rep movsb",
    ".globl blockd_pmem_moved",
    ".hidden blockd_pmem_moved",
    "blockd_pmem_moved:",
    "mov rax, rcx",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    fn blockd_pmem_begin();
    fn blockd_pmem_end();
    fn blockd_pmem_exit();
    fn blockd_pmem_moved();
    fn blockd_pmem_copy(to: *mut u8, from: *const u8, len: usize) -> usize;
    fn blockd_pmem_move(to: *mut u8, from: *const u8, len: usize) -> usize;
    fn blockd_pmem_stream(to: *mut u8, from: *const u8, len: usize) -> usize;
    // The second argument keeps the length in the same register as in the others.
    fn blockd_pmem_zero(to: *mut u8, unused: usize, len: usize) -> usize;
    fn blockd_pmem_clwb(at: *mut u8, unused: usize, len: usize) -> usize;
    fn blockd_pmem_clflushopt(at: *mut u8, unused: usize, len: usize) -> usize;
    fn blockd_pmem_clflush(at: *mut u8, unused: usize, len: usize) -> usize;
}

/// Where it goes on after a fault at an instruction, if that is one of ours.
pub(super) fn exit_of(at: usize) -> Option<usize> {
    let address = |symbol: unsafe extern "C" fn()| symbol as usize;
    let moved = address(blockd_pmem_moved);
    if (address(blockd_pmem_begin)..address(blockd_pmem_end)).contains(&at) {
        Some(address(blockd_pmem_exit))
    } else if (blockd_pmem_move as *const () as usize..moved).contains(&at) {
        Some(moved)
    } else {
        None
    }
}

/// From here on the processor's own routine is faster, where it is fast with short moves too.
const MOVE_BYTES: usize = 2048;
/// Not asked yet, and the answers.
const UNKNOWN: u8 = 0;
const SLOW: u8 = 1;
const FAST: u8 = 2;
static MOVES: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Whether the processor says that it moves bytes fast, short ones as well. Only of such ones is it
/// known that bad memory in the middle of a move can be gone on from: the kernel has an exception
/// for older ones.
fn moves_fast() -> bool {
    match MOVES.load(Ordering::Relaxed) {
        UNKNOWN => {
            let is_fast = std::arch::x86_64::__cpuid_count(7, 0).edx & (1 << 4) != 0;
            MOVES.store(if is_fast { FAST } else { SLOW }, Ordering::Relaxed);
            is_fast
        }
        known => known == FAST,
    }
}

/// How a line gets from the caches to the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WriteBack {
    /// The line stays in the cache.
    Clwb,
    /// The line is given up.
    ClflushOpt,
    /// The line is given up, and each waits for the one before.
    Clflush,
}

impl WriteBack {
    /// The best that this processor has.
    pub(super) fn best() -> Self {
        let leaf = std::arch::x86_64::__cpuid_count(7, 0);
        if leaf.ebx & (1 << 24) != 0 {
            Self::Clwb
        } else if leaf.ebx & (1 << 23) != 0 {
            Self::ClflushOpt
        } else {
            Self::Clflush
        }
    }
}

/// Copies; gives the bytes that are left where memory was found bad.
///
/// # Safety
/// Both ranges are this process's for as long as the call takes: mapped, though touching them may
/// raise SIGBUS, and not the same. Others may write them meanwhile: bytes have no invalid values.
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> usize {
    if len >= MOVE_BYTES && moves_fast() {
        // SAFETY: as the caller promises.
        return unsafe { moved(to, from, len) };
    }
    // SAFETY: the same.
    unsafe { blockd_pmem_copy(to, from, len) }
}

/// Copies by the processor's own routine; gives the bytes that are left where memory was found bad.
///
/// # Safety
/// As [`copy`].
pub(super) unsafe fn moved(to: *mut u8, from: *const u8, len: usize) -> usize {
    // SAFETY: as the caller promises; the routine keeps to the two ranges.
    unsafe { blockd_pmem_move(to, from, len) }
}

/// Stores whole lines past the cache; gives the bytes that are left where memory was found bad.
///
/// # Safety
/// As [`copy`]; `to` is aligned to a line, `len` a number of lines.
pub(super) unsafe fn stream(to: *mut u8, from: *const u8, len: usize) -> usize {
    debug_assert!(to.addr().is_multiple_of(LINE) && len.is_multiple_of(LINE));
    // SAFETY: as the caller promises; the routine keeps to the two ranges.
    unsafe { blockd_pmem_stream(to, from, len) }
}

/// Stores lines of zeroes past the cache; gives the bytes that are left where memory was bad.
///
/// # Safety
/// As [`stream`].
pub(super) unsafe fn zero(to: *mut u8, len: usize) -> usize {
    debug_assert!(to.addr().is_multiple_of(LINE) && len.is_multiple_of(LINE));
    // SAFETY: as the caller promises; the routine keeps to the range.
    unsafe { blockd_pmem_zero(to, 0, len) }
}

/// Writes the lines of a range back; gives the bytes that are left where memory was found bad.
///
/// # Safety
/// As [`stream`].
pub(super) unsafe fn write_back(how: WriteBack, at: *mut u8, len: usize) -> usize {
    debug_assert!(at.addr().is_multiple_of(LINE) && len.is_multiple_of(LINE));
    match how {
        // SAFETY: as the caller promises; `best` has asked the processor for the instruction.
        WriteBack::Clwb => unsafe { blockd_pmem_clwb(at, 0, len) },
        // SAFETY: the same.
        WriteBack::ClflushOpt => unsafe { blockd_pmem_clflushopt(at, 0, len) },
        // SAFETY: the same; every processor of this architecture has it.
        WriteBack::Clflush => unsafe { blockd_pmem_clflush(at, 0, len) },
    }
}

/// Everything stored before reaches the memory before anything stored later does.
pub(super) fn fence() {
    // SAFETY: every processor of this architecture has the instruction, which touches no memory.
    unsafe { std::arch::x86_64::_mm_sfence() }
}
