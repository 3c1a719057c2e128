"""What a real recipe will take on this machine or on a described cluster, by running its controller in virtual time."""
