//! Sockets and ports of the configuration, each of which has to have a place of its own.

use std::collections::BTreeMap;

use blockd_media::error::Error;

use super::super::{Config, ListenAddress};
use super::Source;

impl Source<'_> {
    /// Refuses two sockets with one path, and two listeners with one address: the daemon would
    /// stop at the second one.
    pub(super) fn sockets_differ(&self, config: &Config) -> Result<(), Error> {
        let mut taken: BTreeMap<String, &str> = BTreeMap::new();
        let control = config.control_socket.display().to_string();
        taken.insert(control, "control_socket");
        for (index, listener) in config.nbd.listeners.iter().enumerate() {
            let (name, place) = match &listener.address {
                ListenAddress::Unix { path, .. } => ("unix", path.display().to_string()),
                ListenAddress::Tcp(address) => ("tcp", address.to_string()),
            };
            // The system chooses a port of its own for each.
            if matches!(&listener.address, ListenAddress::Tcp(address) if address.port() == 0) {
                continue;
            }
            if let Some(other) = taken.insert(place.clone(), "nbd.listener") {
                let key = ["nbd", "listener", &index.to_string(), name];
                return Err(self.refuse(&key, place, format!("another one: {other} has it")));
            }
        }
        for (index, pool) in config.pools.iter().enumerate() {
            let index = index.to_string();
            let Some(socket) = &pool.extend_socket else { continue };
            let place = socket.display().to_string();
            if let Some(other) = taken.insert(place.clone(), "pool.extend.socket") {
                let key = ["pool", &index, "extend", "socket"];
                return Err(self.refuse(&key, place, format!("another one: {other} has it")));
            }
        }
        for (index, pool) in config.pools.iter().enumerate() {
            let mut paths = pool.devices.iter().chain(&pool.spares).map(|device| &device.path);
            let found = paths.find_map(|path| Some((path, taken.get(path.to_str()?)?)));
            if let Some((path, other)) = found {
                let key = ["pool", &index.to_string(), "path"];
                let allowed = format!("another one: {other} has it");
                return Err(self.refuse(&key, path.display(), allowed));
            }
        }
        match config.metrics {
            Some(address) if taken.contains_key(&address.to_string()) => {
                let allowed = "another address: nbd.listener has it";
                Err(self.refuse(&["metrics", "address"], address, allowed))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use blockd_media::place::Places;

    use super::*;

    #[test]
    fn each_socket_and_port_has_a_place_of_its_own() {
        let control = "control_socket = \"/run/c\"\n";
        let pool = |path: &str, socket: &str| {
            format!(
                "[[pool]]\nname = \"default\"\npath = \"{path}\"\n[pool.extend]\nsocket = \
                 \"{socket}\"\n"
            )
        };
        let unix = |path: &str| format!("[[nbd.listener]]\nunix = \"{path}\"\n");
        let tcp = |port: u16| format!("[[nbd.listener]]\ntcp = \"127.0.0.1:{port}\"\n");
        let metrics = "[metrics]\naddress = \"127.0.0.1:7\"\n";
        let check = |text: &str| Config::parse(text, None, &Places::of_root());
        let good = [control, &pool("/p", "/run/e"), &unix("/run/n"), &tcp(0), &tcp(0), &tcp(8)];
        let good = good.concat() + metrics;
        assert!(check(&good).is_ok(), "{:?}", check(&good));
        for (bad, field) in [
            (unix("/run/c"), "nbd.listener.unix"),
            (unix("/run/n") + &unix("/run/n"), "nbd.listener.unix"),
            (tcp(7) + &tcp(7), "nbd.listener.tcp"),
            (pool("/p", "/run/c"), "pool.extend.socket"),
            (pool("/run/c", "/run/e"), "pool.path"),
            (tcp(7) + metrics, "metrics.address"),
        ] {
            let error = check(&format!("{control}{bad}")).unwrap_err().to_string();
            assert!(error.contains(&format!("{field} is")), "{bad}: {error}");
            assert!(error.contains("has it"), "{error}");
        }
    }
}
