module pagoda

go 1.24
