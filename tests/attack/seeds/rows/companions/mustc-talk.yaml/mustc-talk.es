hola
adiós
