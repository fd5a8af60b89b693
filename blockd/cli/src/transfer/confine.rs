//! Takes the network and all files but a few from a thread and from the programs that it starts.
//! Without support of the kernel it does nothing: the check of an image's header comes first, and
//! this limits what a flaw in that check, or in qemu-img, can reach.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::sched::{CloneFlags, unshare};

/// Rights of Landlock's first version, for which Linux 5.13 is enough.
const EXECUTE: u64 = 1 << 0;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
/// With those that make and remove.
const ALL: u64 = (1 << 13) - 1;

/// Programs, libraries and what these read of the system.
const SYSTEM: [&str; 14] = [
    "/usr",
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/crypto-policies",
    "/etc/gnutls",
    "/etc/gcrypt",
    "/proc/sys/crypto",
    "/dev/urandom",
];

/// Read and written.
const DEVICES: [&str; 2] = ["/dev/null", "/dev/zero"];

#[repr(C)]
struct RulesetAttr {
    handled_access_fs: u64,
}

#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: i32,
}

const RULE_PATH_BENEATH: libc::c_int = 1;

/// Confines the calling thread for good. `program` is the folder of the program that it will start,
/// `files` are those that may be read.
pub(super) fn this_thread(program: Option<&Path>, files: &[BorrowedFd<'_>]) {
    // Only root may, and others gain little by it: a Unix socket is reached without a network.
    let _ = unshare(CloneFlags::CLONE_NEWNET);
    drop_capabilities();
    let Some(rules) = ruleset() else { return };
    let open = |path: &Path| File::open(path).ok();
    for path in SYSTEM.map(Path::new).into_iter().chain(program) {
        if let Some(file) = open(path) {
            allow(&rules, file.as_fd(), EXECUTE | READ_FILE | READ_DIR);
        }
    }
    for path in DEVICES.map(Path::new) {
        if let Some(file) = open(path) {
            allow(&rules, file.as_fd(), READ_FILE | WRITE_FILE);
        }
    }
    for file in files {
        allow(&rules, *file, READ_FILE);
    }
    if nix::sys::prctl::set_no_new_privs().is_ok() {
        // SAFETY: the call takes a descriptor, which is open, and no memory.
        unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) };
    }
}

/// Leaves the programs that a thread of root starts two capabilities: to read and write files of
/// any owner, which images may have. Other users have no capabilities, and the calls fail.
fn drop_capabilities() {
    /// Numbers from linux/capability.h.
    const DAC_OVERRIDE: libc::c_ulong = 1;
    const DAC_READ_SEARCH: libc::c_ulong = 2;
    const NUMBERS: libc::c_ulong = 64;
    let kept = [DAC_OVERRIDE, DAC_READ_SEARCH];
    for number in (0..NUMBERS).filter(|number| !kept.contains(number)) {
        // SAFETY: the call takes numbers and no memory; it changes the calling thread alone.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) };
    }
}

fn ruleset() -> Option<OwnedFd> {
    let attr = RulesetAttr { handled_access_fs: ALL };
    let size = size_of::<RulesetAttr>();
    // SAFETY: the kernel reads `size` bytes of `attr`, which lives until the call has returned.
    let fd = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size, 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// One that is refused allows less, not more.
fn allow(rules: &OwnedFd, to: BorrowedFd<'_>, access: u64) {
    let is_dir =
        nix::sys::stat::fstat(to).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFDIR);
    let of_files = EXECUTE | WRITE_FILE | READ_FILE;
    let allowed_access = if is_dir { access } else { access & of_files };
    let rule = PathBeneathAttr { allowed_access, parent_fd: to.as_raw_fd() };
    // SAFETY: the kernel reads a rule of this kind, which lives until the call has returned.
    unsafe {
        let (rules, rule) = (rules.as_raw_fd(), &raw const rule);
        libc::syscall(libc::SYS_landlock_add_rule, rules, RULE_PATH_BENEATH, rule, 0);
    }
}
