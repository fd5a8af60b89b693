//! A kernel's console, and the lines of it that mean an error.

/// Parts of lines by which a kernel reports a bug, or a stuck task.
const COMPLAINTS: [&str; 8] = [
    "BUG: ",
    "kernel BUG at ",
    "Oops: ",
    "Kernel panic",
    "general protection fault",
    "blocked for more than ",
    "blocked in I/O wait for more than ",
    "refcount_t: ",
];

/// Starts of lines with the same meaning. Elsewhere in a line the word is advice.
const STARTS: [&str; 1] = ["WARNING: "];

/// Lines after a complaint that are shown with it.
const SHOWN: usize = 30;

/// The first unexpected complaint, with the lines that follow it.
pub(super) fn complaint(console: &str, expected: &[String]) -> Option<String> {
    let lines: Vec<&str> = console.lines().collect();
    let at = lines.iter().position(|line| {
        let said = without_time(line);
        let bad = COMPLAINTS.iter().any(|part| said.contains(part))
            || STARTS.iter().any(|start| said.starts_with(start));
        bad && !expected.iter().any(|part| said.contains(part))
    })?;
    Some(lines[at..lines.len().min(at + SHOWN)].join("\n"))
}

/// A line without the time and the task that the kernel puts in brackets before it.
fn without_time(line: &str) -> &str {
    let mut rest = line;
    while let Some((_, after)) = rest.strip_prefix('[').and_then(|inside| inside.split_once(']')) {
        rest = after.trim_start();
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> bool {
        complaint(&format!("[    0.1] all is well\n{line}\n[    9.0] more"), &[]).is_some()
    }

    #[test]
    fn complaints_are_distinguished_from_advice() {
        for line in [
            "[   12.345678] WARNING: CPU: 0 PID: 1 at fs/inode.c:1 drop+0x1/0x2",
            "[   12.345678][  T123] WARNING: fs/inode.c:1 at drop+0x1/0x2, CPU#0: init/1",
            "[   12.345678] WARNING: possible circular locking dependency detected",
            "[   12.345678] BUG: kernel NULL pointer dereference, address: 0",
            "[   12.345678] kernel BUG at mm/slub.c:1!",
            "[   12.345678] Oops: 0000 [#1] SMP",
            "[  242.000000] INFO: task mount:77 blocked for more than 30 seconds.",
            "[   12.345678] watchdog: BUG: soft lockup - CPU#0 stuck for 26s!",
        ] {
            assert!(found(line), "{line}");
        }
        for line in [
            "[    0.100000] Spectre V2 : WARNING: Unprivileged eBPF is enabled",
            "[    0.100000] Command line: console=ttyS0",
        ] {
            assert!(!found(line), "{line}");
        }
    }

    #[test]
    fn an_expected_complaint_is_skipped_and_hides_no_other() {
        let console = "[1] WARNING: at one\n[2] WARNING: at two\n[3] trace";
        let expected = ["at one".to_owned()];
        let said = complaint(console, &expected).unwrap();
        assert_eq!(said, "[2] WARNING: at two\n[3] trace");
    }
}
