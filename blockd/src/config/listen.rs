//! The arguments of `blockd serve` about sockets.

use std::path::PathBuf;

use blockd_media::error::Error;
use blockd_media::names::check_socket_path;

use super::Config;

impl Config {
    /// Takes `PATH`, or `POOL=PATH`, as the socket on which that pool's requests for more space are
    /// answered. Without a name the default pool is meant.
    pub fn listen(&mut self, text: &str) -> Result<(), Error> {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) if !text.starts_with('/') => (name, path),
            _ => (self.default_pool.as_str(), text),
        };
        let path = PathBuf::from(path);
        if !path.is_absolute() {
            return Err(Error::invalid("listen", text, "an absolute path, or POOL=PATH"));
        }
        check_socket_path(&path).map_err(|allowed| Error::invalid("listen", text, allowed))?;
        if let Some(other) = self
            .pools
            .iter()
            .find(|pool| pool.name != name && pool.extend_socket.as_ref() == Some(&path))
        {
            let allowed = format!("another path: pool {} has this one", other.name);
            return Err(Error::invalid("listen", text, allowed));
        }
        let name = name.to_owned();
        let Some(pool) = self.pools.iter_mut().find(|pool| pool.name == name) else {
            return Err(Error::invalid("listen", text, "a pool of the configuration, then =PATH"));
        };
        pool.extend_socket = Some(path);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use blockd_media::place::Places;

    use super::*;

    #[test]
    fn a_path_is_for_the_default_pool_and_a_name_says_another() {
        let two = "[[pool]]\nname = \"a\"\npath = \"/a\"\n[[pool]]\nname = \"b\"\npath = \"/b\"\n\
                   [pool.extend]\nsocket = \"/run/b\"";
        let mut config = Config::parse(two, None, &Places::of_root()).unwrap();
        let sockets = |config: &Config| {
            let socket = |at: usize| config.pools[at].extend_socket.clone();
            [0, 1].map(|at| socket(at).map(|path| path.display().to_string()))
        };
        assert_eq!(sockets(&config), [None, Some("/run/b".to_owned())]);
        config.listen("/run/a=1").unwrap();
        config.listen("b=/run/c").unwrap();
        assert_eq!(sockets(&config), ["/run/a=1", "/run/c"].map(|path| Some(path.to_owned())));
        let long = format!("/{}", "x".repeat(107));
        for bad in ["run/a", "", "a=", "c=/run/d", "a=/run/c", long.as_str()] {
            let error = config.listen(bad).unwrap_err();
            assert!(error.to_string().starts_with("listen is "), "{bad}: {error}");
        }
        assert_eq!(sockets(&config), ["/run/a=1", "/run/c"].map(|path| Some(path.to_owned())));
    }
}
