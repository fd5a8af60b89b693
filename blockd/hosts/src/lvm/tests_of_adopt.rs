//! A lock manager that was started anew has no leases until they are given to it. The texts are
//! those of LVM 2.03.31.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use blockd_media::program::Ended;
use parking_lot::Mutex;

use crate::cell::CellName;
use crate::coordinator::Coordinator as _;
use crate::error::HostsError;

use super::Lvm;
use super::command::Commands;
use super::tests::{GROUP, VOLUMES};

/// Sanlock's own lines, and the leases of `cell-one`, of `cell-two` and of another group.
const STATUS: &str = "\
daemon a
p -1 helper
s lvm_san:1:/dev/mapper/san-lvmlock:0
r lvm_san:g-h-i:/dev/mapper/san-lvmlock:72351744:1 p 139 ORPHAN
r lvm_san:a-b-c:/dev/mapper/san-lvmlock:70254592:1 p 139 ORPHAN
r lvm_sand:x-y-z:/dev/mapper/sand-lvmlock:70254592:1 p 139 ORPHAN
";

#[derive(Default)]
struct Host {
    is_started: bool,
    /// Logical volumes whose leases the lock manager has.
    leases: Vec<String>,
    lines: Vec<String>,
}

impl Host {
    /// The output of a command, or its error.
    fn answer(&mut self, name: &str, words: &[&str]) -> Result<String, String> {
        self.lines.push(format!("{name} {}", words.join(" ")));
        let last = *words.last().unwrap();
        let adopts = words.windows(2).any(|pair| pair == ["--lockopt", "adopt"]);
        match name {
            "sanlock" if self.leases.len() == 2 => Ok(STATUS.replace(" ORPHAN", "")),
            "sanlock" => Ok(STATUS.to_owned()),
            "vgs" => Ok(GROUP.to_owned()),
            "vgchange" if adopts => {
                self.is_started = true;
                Ok(String::new())
            }
            _ if !self.is_started => Err("  Global lock failed: error -210".to_owned()),
            "lvs" => Ok(VOLUMES.to_owned()),
            "lvchange" if adopts => {
                self.leases.push(last.to_owned());
                Ok(String::new())
            }
            // This one is not refused, and leaves the lease.
            "lvchange" if words[0] == "-an" => Ok(String::new()),
            _ if !self.leases.iter().any(|lease| lease == last) => {
                Err(format!("  LV {last} lock failed: orphan lock needs to be adopted."))
            }
            _ => Ok(String::new()),
        }
    }
}

/// A host of the group after its lock manager was started anew.
fn restarted() -> (Lvm, Arc<Mutex<Host>>) {
    let host: Arc<Mutex<Host>> = Arc::default();
    let shared = Arc::clone(&host);
    let commands = Commands::new(move |name, words| {
        let answer = shared.lock().answer(name, words);
        let code = if answer.is_ok() { 0 } else { 5 };
        Ok(Ended {
            status: Some(ExitStatus::from_raw(code << 8)),
            errors: answer.as_ref().err().cloned().unwrap_or_default(),
            output: answer.unwrap_or_default(),
            took: Duration::ZERO,
        })
    });
    (Lvm { name: "san".to_owned(), commands }, host)
}

#[test]
fn a_cell_grows_after_the_lock_manager_was_started_anew() {
    let (lvm, host) = restarted();
    let one = CellName::parse("one").unwrap();
    lvm.extend(&one, 8 << 20).unwrap();
    let extended = host.lock().lines.iter().filter(|line| line.starts_with("lvextend")).count();
    assert_eq!(extended, 1, "{:?}", host.lock().lines);
    assert_eq!(host.lock().leases, ["san/cell-two", "san/cell-one"]);
    // The lease of a cell that is not in use here is given back, and others can have it.
    assert!(host.lock().lines.contains(&"lvchange -an san/cell-two".to_owned()));
}

#[test]
fn each_call_about_a_cell_has_its_lease_taken_over_first() {
    for call in ["acquire", "release", "remove", "mark"] {
        let (lvm, host) = restarted();
        let one = CellName::parse("one").unwrap();
        match call {
            "acquire" => lvm.acquire(&one).map(drop),
            "release" => lvm.release(&one),
            "remove" => lvm.remove(&one),
            _ => lvm.mark_new(&one),
        }
        .unwrap();
        let host = host.lock();
        assert_eq!(host.leases.len(), 2, "{call}: {:?}", host.lines);
    }
}

#[test]
fn a_host_that_has_left_the_group_does_not_join_it_again() {
    let (mut lvm, host) = restarted();
    lvm.name = "other".to_owned();
    let error = lvm.acquire(&CellName::parse("one").unwrap()).unwrap_err();
    assert!(matches!(error, HostsError::Away { .. }), "{error}");
    assert!(!host.lock().is_started);
}
