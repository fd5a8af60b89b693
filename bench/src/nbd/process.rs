//! Resource usage of a server's processes, from /proc.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::unistd::{SysconfVar, sysconf};

/// A process and all that it has started, as far as they are still below it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tree {
    root: u32,
}

/// The fields of /proc/PID/stat that matter here.
struct Stat {
    parent: u32,
    /// utime, stime, and both of ended children, in ticks. Threads that have ended are in it, and
    /// those in which the kernel works for the process's rings.
    ticks: u64,
}

impl Tree {
    /// Reads the usage of the process with this id.
    #[must_use]
    pub fn new(root: u32) -> Self {
        Self { root }
    }

    /// The id of the process itself.
    #[must_use]
    pub const fn root(&self) -> u32 {
        self.root
    }

    /// The processes, the root first.
    pub fn pids(&self) -> Result<Vec<u32>> {
        let mut parents = BTreeMap::new();
        for entry in fs::read_dir("/proc")? {
            let Ok(name) = entry?.file_name().into_string() else { continue };
            let Ok(pid) = name.parse::<u32>() else { continue };
            // One that ends between the two calls is none of ours, or has been waited for.
            if let Ok(stat) = stat(pid) {
                parents.insert(pid, stat.parent);
            }
        }
        let mut pids = vec![self.root];
        let mut at = 0;
        while let Some(&pid) = pids.get(at) {
            pids.extend(parents.iter().filter(|(_, parent)| **parent == pid).map(|(pid, _)| *pid));
            at += 1;
        }
        Ok(pids)
    }

    /// CPU time so far, user and system.
    pub fn cpu(&self) -> Result<Duration> {
        let mut ticks = 0;
        for pid in self.pids()? {
            match stat(pid) {
                Ok(stat) => ticks += stat.ticks,
                Err(error) if pid == self.root => return Err(error),
                Err(_) => {}
            }
        }
        let each = sysconf(SysconfVar::CLK_TCK)?.unwrap_or(100);
        Ok(Duration::from_secs_f64(ticks as f64 / each as f64))
    }

    /// Bytes of memory of its own that are resident: neither files nor shared memory.
    pub fn resident(&self) -> Result<u64> {
        let mut bytes = 0;
        for pid in self.pids()? {
            let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            bytes += field(&text, "RssAnon:").unwrap_or(0) << 10;
        }
        Ok(bytes)
    }

    /// Nanoseconds that threads which still exist were on a processor, as the scheduler has them.
    pub fn scheduled_ns(&self) -> Result<u64> {
        self.sum_of_threads(|thread| {
            let text = fs::read_to_string(thread.join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse().ok()
        })
    }

    /// How often threads which still exist have left a processor, by themselves or not.
    pub fn switches(&self) -> Result<u64> {
        self.sum_of_threads(|thread| {
            let text = fs::read_to_string(thread.join("status")).ok()?;
            let by_themselves = field(&text, "voluntary_ctxt_switches:")?;
            Some(by_themselves + field(&text, "nonvoluntary_ctxt_switches:")?)
        })
    }

    /// The threads, by their ids.
    pub fn threads(&self) -> Result<Vec<u32>> {
        let mut threads = Vec::new();
        for pid in self.pids()? {
            for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
                threads.extend(thread?.file_name().to_str().and_then(|id| id.parse::<u32>().ok()));
            }
        }
        Ok(threads)
    }

    fn sum_of_threads(&self, figure: impl Fn(&std::path::Path) -> Option<u64>) -> Result<u64> {
        let mut sum = 0;
        for pid in self.pids()? {
            for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
                // A thread that has ended meanwhile has no figure.
                sum += figure(&thread?.path()).unwrap_or(0);
            }
        }
        Ok(sum)
    }

    /// How often each thread has gone to sleep by itself, by thread id, with its name. A thread
    /// that sleeps has been woken as often.
    pub fn sleeps(&self) -> Result<BTreeMap<u32, (String, u64)>> {
        let mut sleeps = BTreeMap::new();
        for pid in self.pids()? {
            let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
            for thread in threads {
                let path = thread?.path();
                let text = fs::read_to_string(path.join("status")).unwrap_or_default();
                let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
                let id = path.file_name().and_then(|id| id.to_str()?.parse().ok());
                if let (Some(id), Some(count)) = (id, field(&text, "voluntary_ctxt_switches:")) {
                    sleeps.insert(id, (name.trim().to_owned(), count));
                }
            }
        }
        Ok(sleeps)
    }
}

fn stat(pid: u32) -> Result<Stat> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat"))?)
}

fn parse(text: &str) -> Result<Stat> {
    // The name is in parentheses and may hold anything.
    let rest = text.rsplit_once(')').map(|(_, rest)| rest).context("no name in a stat line")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |index: usize| -> Result<u64> {
        fields.get(index).and_then(|field| field.parse().ok()).context("a short stat line")
    };
    let ticks = [11, 12, 13, 14].into_iter().map(number).sum::<Result<u64>>()?;
    Ok(Stat { parent: u32::try_from(number(1)?)?, ticks })
}

fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_with_an_odd_name_is_read() {
        let line = "7 (a) b) S 3 7 7 0 -1 4194560 0 0 0 0 10 20 3 4 20 0 1 0";
        let stat = parse(line).unwrap();
        assert_eq!((stat.parent, stat.ticks), (3, 37));
    }

    #[test]
    fn we_are_below_ourselves() {
        let tree = Tree::new(std::process::id());
        assert_eq!(tree.pids().unwrap()[0], std::process::id());
        assert!(tree.resident().unwrap() > 0);
        assert!(tree.threads().unwrap().contains(&std::process::id()));
        assert!(tree.sleeps().unwrap().contains_key(&std::process::id()));
    }
}
