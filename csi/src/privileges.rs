//! The capabilities of the plugin's process and of the tools that it starts. Its container has to
//! be privileged, since Kubernetes gives mount propagation to such containers only; the process
//! gives up what it does not need of that before it serves anything.

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs,
};

use crate::error::Error;
use crate::options::{Options, Service};

/// Ports below need a capability.
const FIRST_FREE_PORT: u16 = 1024;

/// Bits of a set: the kernel has fewer capabilities, and says which is beyond its last.
const MOST: u32 = u64::BITS;

/// The capabilities that a plugin with these options needs.
#[must_use]
pub fn needed(options: &Options) -> CapabilitySet {
    // Sockets and folders of the daemon and of the kubelet, whatever user and mode they have.
    let mut needed = CapabilitySet::DAC_OVERRIDE;
    if options.services.contains(&Service::Node) {
        // Mounts, the read-only flag of devices, and growing xfs and btrfs; growing ext4.
        needed |= CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_RESOURCE;
    }
    if options.endpoint_group.is_some() {
        needed |= CapabilitySet::CHOWN;
    }
    let mut addresses = options.metrics_address.iter().chain(&options.health_address);
    if addresses.any(|address| address.port() < FIRST_FREE_PORT) {
        needed |= CapabilitySet::NET_BIND_SERVICE;
    }
    needed
}

/// Keeps these capabilities, as far as the process has them, and gives up all others for itself and
/// for the programs that it starts. To be called while the process has one thread: capabilities are
/// those of a thread, and new threads inherit them.
///
/// # Errors
/// The kernel refuses what every process may do.
pub fn keep_only(needed: CapabilitySet) -> Result<(), Error> {
    let failed = |errno: Errno| Error::io("giving up capabilities", errno.into());
    // From here on no program gains any by being started, not even by its file or as root.
    set_no_new_privs(true).map_err(failed)?;
    for capability in (0..MOST).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
        // The kernel has fewer.
        let Ok(bounded) = capability_is_in_bounding_set(capability) else { break };
        if bounded && !needed.contains(capability) {
            match remove_capability_from_bounding_set(capability) {
                // Without the right to change this set, the flag above does the same.
                Ok(()) | Err(Errno::PERM) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
    }
    clear_ambient_capability_set().map_err(failed)?;
    let had = capabilities(None).map_err(failed)?;
    let permitted = had.permitted & needed;
    let sets =
        CapabilitySets { effective: permitted, permitted, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(failed)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn of(words: &[&str]) -> CapabilitySet {
        let words = [&["blockd-csi", "--node-id", "n"], words].concat();
        needed(&Options::try_parse_from(words).unwrap())
    }

    #[test]
    fn a_plugin_keeps_the_capabilities_of_its_options() {
        let file_access = CapabilitySet::DAC_OVERRIDE;
        let node = file_access | CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_RESOURCE;
        assert_eq!(of(&[]), node);
        assert_eq!(of(&["--services", "controller"]), file_access);
        assert_eq!(of(&["--endpoint-group", "65532"]), node | CapabilitySet::CHOWN);
        assert_eq!(of(&["--metrics-address", "127.0.0.1:9810"]), node);
        let low_port = CapabilitySet::NET_BIND_SERVICE;
        assert_eq!(of(&["--metrics-address", "127.0.0.1:80"]), node | low_port);
    }

    /// In a thread of its own, which ends with the test: capabilities are those of a thread.
    #[test]
    fn a_thread_keeps_what_it_needs_and_its_programs_gain_nothing() {
        let work = || {
            keep_only(CapabilitySet::DAC_OVERRIDE).unwrap();
            let left = capabilities(None).unwrap();
            assert!(CapabilitySet::DAC_OVERRIDE.contains(left.permitted), "{left:?}");
            let output = std::process::Command::new("cat").arg("/proc/self/status").output();
            String::from_utf8(output.unwrap().stdout).unwrap()
        };
        let said = std::thread::spawn(work).join().unwrap();
        let value = |name: &str| {
            let line = said.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        };
        let most = CapabilitySet::DAC_OVERRIDE.bits();
        for name in ["CapPrm:", "CapEff:", "CapInh:", "CapAmb:"] {
            assert_eq!(value(name) & !most, 0, "{said}");
        }
        assert_eq!(value("NoNewPrivs:"), 1);
        // Only root may change this one.
        if nix::unistd::geteuid().is_root() {
            assert_eq!(value("CapBnd:") & !most, 0, "{said}");
        }
    }
}
